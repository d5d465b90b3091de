"""Other calls and other vendors: Gemini, LangChain, moderations, images, speech."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest

import kedge
from kedge.llm.bills import Bill
from kedge.llm.cache import JOB, Cache
from kedge.llm.keys import http_request
from kedge.llm.pricing import Tokens
from tests.parts import library

GEMINI = "gemini-2.5-flash"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


def bill(store: kedge.CheckpointManager) -> Bill:
    Cache.of(store).settle()
    return sum(kedge.llm.totals(store).values(), Bill())


class Gemini:
    """Google's protocol: the model is in the path, and a stream has no line for its end."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def respond(self, request: httpx.Request) -> httpx.Response:
        method = request.url.path.rpartition(":")[2]
        self.calls[method] += 1
        if method == "batchEmbedContents":
            return httpx.Response(200, json={"embeddings": [{"values": [0.5, 0.25]}]})
        if method == "generateContent":
            return httpx.Response(200, json=self._chunk("all of it", "STOP"))
        chunks = [self._chunk("in two", None), self._chunk(" pieces", "STOP")]
        content = b"".join(f"data: {json.dumps(chunk)}\r\n\r\n".encode() for chunk in chunks)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=iter([content]))

    async def respond_later(self, request: httpx.Request) -> httpx.Response:
        return self.respond(request)

    def _chunk(self, text: str, reason: str | None) -> dict[str, Any]:
        candidate = {"content": {"role": "model", "parts": [{"text": text}]}, "index": 0}
        usage = {"promptTokenCount": 1000, "candidatesTokenCount": 50, "thoughtsTokenCount": 50}
        ended = {"finishReason": reason} if reason else {}
        return {"candidates": [candidate | ended], "usageMetadata": usage, "modelVersion": GEMINI}


def test_gemini(store: kedge.CheckpointManager) -> None:
    genai = library("google.genai")
    vendor = Gemini()
    for _ in range(2):
        transport = httpx.MockTransport(vendor.respond)
        with kedge.llm.http_client(store=store, library="httpx", transport=transport) as http_client:
            client = genai.Client(api_key="secret-key", http_options={"httpx_client": http_client})
            assert client.models.generate_content(model=GEMINI, contents="hello").text == "all of it"
            stream = client.models.generate_content_stream(model=GEMINI, contents="hello")
            assert "".join(chunk.text for chunk in stream) == "in two pieces"
            embedded = client.models.embed_content(model="gemini-embedding-001", contents="hello")
            assert embedded.embeddings[0].values == [0.5, 0.25]
    assert vendor.calls == {"generateContent": 1, "streamGenerateContent": 1, "batchEmbedContents": 1}
    total = bill(store)
    assert (total.paid, total.found, total.paid_unpriced) == (3, 3, 1)
    assert total.tokens_paid == Tokens(2000, 200)
    assert total.spent == 2 * (1000 * Decimal("0.3") + 100 * Decimal("2.5")) / 1_000_000
    models = {entry.metadata["model"] for entry in store.list(JOB)}
    assert models == {GEMINI, "gemini-embedding-001"}


def test_gemini_in_asyncio(store: kedge.CheckpointManager) -> None:
    genai = library("google.genai")
    vendor = Gemini()

    async def main() -> str:
        transport = httpx.MockTransport(vendor.respond_later)
        async with kedge.llm.async_http_client(store=store, library="httpx", transport=transport) as http_client:
            client = genai.Client(api_key="k", http_options={"httpx_async_client": http_client})
            answer = await client.aio.models.generate_content(model=GEMINI, contents="hello")
            return str(answer.text)

    assert asyncio.run(main()) == asyncio.run(main()) == "all of it"
    assert vendor.calls == {"generateContent": 1}


def test_an_abandoned_stream_of_gemini_is_not_kept(store: kedge.CheckpointManager) -> None:
    chunk = json.dumps({"candidates": [{"content": {"parts": [{"text": "finishReason"}]}}]})

    def respond(request: httpx2.Request) -> httpx2.Response:
        content = iter([f"data: {chunk}\n\n".encode()])
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=content)

    with kedge.llm.http_client(store=store, transport=httpx2.MockTransport(respond)) as http_client:
        http_client.post(f"http://g/v1beta/models/{GEMINI}:streamGenerateContent?alt=sse", json={"contents": []})
    assert store.list(JOB) == []
    assert bill(store).paid == 1


@pytest.mark.parametrize(
    ("path", "is_call"),
    [
        ("/v1/moderations", True),
        ("/v1/images/generations", True),
        ("/v1beta/models/gemini-2.5-flash:generateContent", True),
        ("/v1/projects/p/locations/l/publishers/google/models/gemini-2.5-pro:generateContent", True),
        ("/v1beta/models/gemini-2.5-flash:countTokens", False),
        ("/v1beta/models:generateContent", False),
        ("/v1beta/cachedContents", False),
        ("/v1/batches", False),
        ("/v1/messages/batches", False),
        ("/v1/files", False),
        ("/v1/images/edits", False),
        ("/v1/messages", False),
    ],
)
def test_calls_without_a_model_in_their_body(path: str, is_call: bool) -> None:
    assert (http_request("POST", f"https://api.example.org{path}", b'{"input": "x"}') is not None) is is_call


class OpenAI:
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def respond(self, request: httpx2.Request) -> httpx2.Response:
        kind = request.url.path.rpartition("/")[2]
        self.calls[kind] += 1
        if kind == "speech":
            return httpx2.Response(200, headers={"content-type": "audio/mpeg"}, content=b"\xff\xfb\x90sound")
        if kind == "moderations":
            return httpx2.Response(200, json={"id": "m", "model": "omni-moderation-latest", "results": []})
        asked = json.loads(request.content)
        image = {"url": "https://images/1"} if asked.get("response_format") == "url" else {"b64_json": "aW1hZ2U="}
        details = {"text_tokens": 100, "image_tokens": 0}
        usage = {"input_tokens": 100, "output_tokens": 1000, "total_tokens": 1100, "input_tokens_details": details}
        return httpx2.Response(200, json={"created": 1, "data": [image], "usage": usage})


def test_moderations_images_and_speech(store: kedge.CheckpointManager) -> None:
    vendor = OpenAI()
    for _ in range(2):
        transport = httpx2.MockTransport(vendor.respond)
        http_client = kedge.llm.http_client(store=store, transport=transport)
        with openai.OpenAI(api_key="k", base_url="http://o/v1", http_client=http_client) as client:
            assert client.moderations.create(input="hello").results == []
            image = client.images.generate(model="gpt-image-1", prompt="a cat")
            assert image.data is not None
            assert image.data[0].b64_json == "aW1hZ2U="
            sound = client.audio.speech.create(model="gpt-4o-mini-tts", voice="alloy", input="hello")
            assert sound.content == b"\xff\xfb\x90sound"
    assert vendor.calls == {"moderations": 1, "generations": 1, "speech": 1}
    total = bill(store)
    assert (total.paid, total.found, total.paid_unpriced) == (3, 3, 2)
    assert total.spent == total.saved > 0


def test_addresses_of_images_are_not_kept(store: kedge.CheckpointManager) -> None:
    vendor = OpenAI()
    http_client = kedge.llm.http_client(store=store, transport=httpx2.MockTransport(vendor.respond))
    with openai.OpenAI(api_key="k", base_url="http://o/v1", http_client=http_client) as client:
        for _ in range(2):
            client.images.generate(model="dall-e-3", prompt="a cat", response_format="url")
    assert vendor.calls == {"generations": 2}
    assert store.list(JOB) == []
