"""The LLM cache under the vendors' own SDKs, against a server that counts."""

import asyncio
import gc
import gzip
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kedge
from kedge.llm.bills import Bill, Charge
from kedge.llm.cache import JOB, Answer, Cache
from kedge.llm.flights import JOB as FLIGHTS
from kedge.llm.keys import Request, canonical, http_request
from kedge.llm.pricing import Tokens, cost_of, dollars, price, tokens_of
from tests.servers.models import ModelServer
from tests.waiting import wait_for_async

SECRET = "sk-very-secret-4711"
MODEL = "gpt-4o-mini"


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


def messages(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture
def client(server: ModelServer, store: kedge.CheckpointManager) -> Iterator[Callable[..., openai.OpenAI]]:
    """OpenAI's client on a transport of ours, closed at the end."""
    made: list[openai.OpenAI] = []

    def make(mode: str = "record", **options: Any) -> openai.OpenAI:
        http_client = kedge.llm.http_client(mode, store=store, **options)
        made.append(openai.OpenAI(api_key=SECRET, base_url=f"{server.url}/v1", http_client=http_client, max_retries=0))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ask(client: openai.OpenAI, text: str, **options: Any) -> str:
    answer = client.chat.completions.create(model=MODEL, messages=messages(text), **options)
    return str(answer.choices[0].message.content)


def bill(store: kedge.CheckpointManager) -> Bill:
    Cache.of(store).settle()
    return sum(kedge.llm.totals(store).values(), Bill())


def flights(store: kedge.CheckpointManager) -> list[Any]:
    """The calls under way, once what is over is deleted."""
    Cache.of(store).settle()
    return store.list(FLIGHTS)


# Keys

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def shuffled(value: Any) -> Any:
    """The same value, written differently: names in another order, whole numbers as floats."""
    if isinstance(value, dict):
        return {name: shuffled(inner) for name, inner in reversed(value.items())}
    if isinstance(value, list):
        return [shuffled(inner) for inner in value]
    if type(value) is int and abs(value) < 2**53:
        return float(value)
    return value


@settings(max_examples=60, deadline=None)
@given(plain, plain)
def test_keys_are_canonical(one: Any, other: Any) -> None:
    text = canonical(one)
    assert canonical(shuffled(one)) == text
    assert canonical(json.loads(text)) == text
    assert canonical(json.loads(json.dumps(one, indent=3, ensure_ascii=False))) == text
    if canonical(other) == text:  # then nothing tells them apart
        assert json.loads(json.dumps(shuffled(one))) == json.loads(json.dumps(shuffled(other)))


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), plain, max_size=5), st.integers(0, 5))
def test_a_request_is_known_by_all_of_its_body(fields: dict[str, Any], sample: int) -> None:
    asked = {**fields, "model": "m"}
    url = "https://api.example.org/v1/chat/completions"
    request = http_request("POST", url, json.dumps(asked).encode())
    assert request is not None
    again = http_request("POST", url, json.dumps(shuffled(asked)).encode())
    assert again is not None
    assert again.key == request.key
    for changed in ({**asked, "model": "n"}, {**asked, "one more": 1}):
        other = http_request("POST", url, json.dumps(changed).encode())
        assert other is None or other.key != request.key
    assert Request("POST", url, asked, sample + 1).key != Request("POST", url, asked, sample).key


def test_credentials_of_the_caller_are_no_part_of_a_request() -> None:
    def request(url: str, tool: dict[str, Any]) -> Request:
        found = http_request("POST", url, json.dumps({"model": "m", "input": "x", "tools": [tool]}).encode())
        assert found is not None
        return found

    one = request(
        f"https://user:{SECRET}@API.example.org/v1/responses?key={SECRET}&b=2&a=1",
        {
            "type": "mcp",
            "server_url": f"https://t.org/?token={SECRET}",
            "authorization": SECRET,
            "headers": {"X": SECRET},
        },
    )
    assert SECRET not in json.dumps(one.document())
    assert one.where == "https://api.example.org/v1/responses?a=1&b=2"
    same = request(
        "https://api.example.org/v1/responses?a=1&b=2",
        {
            "type": "mcp",
            "server_url": f"https://t.org/?token={SECRET}",
            "authorization": SECRET,
            "headers": {"X": SECRET},
        },
    )
    assert same.key == one.key
    schema = {
        "type": "function",
        "name": "f",
        "parameters": {"properties": {"token": {"type": "string"}}, "token": "a"},
    }
    other = {**schema, "parameters": {**schema["parameters"], "token": "b"}}  # type: ignore[dict-item]
    where = "https://api.example.org/v1/responses"
    assert request(where, schema).key != request(where, other).key


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/chat/completions", b"{}"),
        ("POST", "/v1/files", b'{"model": "m"}'),
        ("POST", "/v1/threads/t/messages", b'{"role": "user"}'),
        ("POST", "/v1/chat/completions", b"not json"),
        ("POST", "/v1/chat/completions", b"[" * 100_000),
        ("POST", "/v1/chat/completions", b'{"model": "m", "x": NaN'),
        ("POST", "/v1/chat/completions", b'{"model": "m", "x": NaN}'),
    ],
)
def test_what_is_no_call_is_not_kept(method: str, path: str, body: bytes) -> None:
    assert http_request(method, f"https://api.example.org{path}", body) is None


def test_nan_is_refused() -> None:
    with pytest.raises(kedge.Validation):
        canonical({"temperature": float("nan")})
    with pytest.raises(kedge.Validation):
        canonical({1: "a name that is not text"})


# Money


def test_tokens_of_all_vendors() -> None:
    chat = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    assert tokens_of({"usage": chat}) == Tokens(10, 2, 4)
    responses = {"input_tokens": 10, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}
    assert tokens_of({"usage": responses}) == Tokens(10, 2, 4)
    vendor = {"input_tokens": 10, "output_tokens": 2, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 7}
    assert tokens_of({"usage": vendor}) == Tokens(117, 2, 100, 7)
    gemini = {"promptTokenCount": 10, "candidatesTokenCount": 2, "thoughtsTokenCount": 3, "cachedContentTokenCount": 4}
    assert tokens_of({"usageMetadata": gemini}) == Tokens(10, 5, 4)
    assert tokens_of({}) is None
    assert tokens_of({"usage": {"prompt_tokens": "many"}}) == Tokens()


def test_costs_are_those_of_the_vendors_price_lists() -> None:
    """Tokens written to a cache for an hour, and searches, have prices of their own."""
    usage = {"input_tokens": 0, "output_tokens": 0, "cache_creation_input_tokens": 1_000_000}
    for kept_for, dollars_each in (("5m", Decimal("1.25")), ("1h", Decimal(2))):
        written = {**usage, "cache_creation": {f"ephemeral_{kept_for}_input_tokens": 1_000_000}}
        assert cost_of({"usage": written}, "claude-haiku-4-5") == dollars_each
    searched = {"input_tokens": 0, "output_tokens": 0, "server_tool_use": {"web_search_requests": 100}}
    assert cost_of({"usage": searched}, "claude-haiku-4-5") == 1
    used = {"input_tokens": 0, "output_tokens": 0, "input_tokens_details": {"cached_tokens": 0}}
    output = [
        {"type": "web_search_call", "action": {"type": "search"}},
        {"type": "web_search_call", "action": {"type": "open_page"}},
        {"type": "message"},
    ]
    assert cost_of({"usage": used, "output": output}, "gpt-5-mini") == Decimal("0.01")
    assert cost_of({"usage": {"prompt_tokens": "many"}}, MODEL) is None
    assert cost_of({"usage": used, "model": "nobody-knows-this"}, MODEL) == 0


def test_an_unknown_model_is_unpriced_not_free() -> None:
    assert price("nobody-knows-this", Tokens(1000, 10)) is None
    known = price(MODEL, Tokens(1_000_000, 0), "http://127.0.0.1:1/v1")
    assert known is not None
    assert known > 0
    unpriced = Bill().add(Charge("x", Tokens(1, 1), None, is_saved=False))
    assert str(unpriced) == "1 paid, unpriced"
    mixed = unpriced.add(Charge(MODEL, Tokens(1, 1), Decimal("0.25"), is_saved=False))
    assert str(mixed) == "2 paid, $0.25 spent and 1 unpriced"
    assert Bill.from_json(json.loads(json.dumps(mixed.to_json()))) == mixed


def test_dollars() -> None:
    assert [dollars(Decimal(x)) for x in ("0", "1234.5", "0.25", "0.0123", "0.000000435")] == [
        "$0.00", "$1,234.50", "$0.25", "$0.012", "$0.00000044",
    ]  # fmt: skip


# Through the SDKs


@pytest.mark.parametrize("library", ["httpx2", "httpx"])
def test_openai(server: ModelServer, store: kedge.CheckpointManager, client: Any, library: str) -> None:
    for _ in range(2):
        sdk = client(library=library)
        first = ask(sdk, "one two three")
        assert first == "3 words, such as: one two three"
        streamed = sdk.chat.completions.create(model=MODEL, messages=messages("a stream"), stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "2words,suchas:astream"
        assert sdk.responses.create(model=MODEL, input="a response").output_text == "2 words, such as: a response"
        assert [e.type for e in sdk.responses.create(model=MODEL, input="events", stream=True)] == [
            "response.completed"
        ]
        embedded = sdk.embeddings.create(model="text-embedding-3-small", input="ab c", encoding_format="float")
        assert embedded.data[0].embedding == [2.0, 1.0]
    assert set(server.calls.values()) == {1}
    assert len(server.calls) == 5
    assert (bill(store).paid, bill(store).found) == (5, 5)
    assert store.verify().is_ok
    assert flights(store) == []


def test_anthropic(server: ModelServer, store: kedge.CheckpointManager) -> None:
    for _ in range(2):
        http_client = kedge.llm.http_client(store=store)
        with anthropic.Anthropic(api_key=SECRET, base_url=server.url, http_client=http_client) as sdk:
            said = sdk.messages.create(model="claude-haiku-4-5", max_tokens=9, messages=messages("one two"))
            assert said.content[0].text == "2 words, such as: one two"  # type: ignore[union-attr]
            with sdk.messages.stream(model="claude-haiku-4-5", max_tokens=9, messages=messages("three")) as stream:
                assert "".join(stream.text_stream) == "1 words, such as: three"
    assert server.calls == {"one two": 1, "three": 1}
    total = bill(store)
    assert total.tokens_paid == Tokens(203, 14, 200) == total.tokens_found
    assert total.spent == total.saved > 0


@pytest.mark.parametrize("library", ["httpx2", "httpx"])
def test_async(server: ModelServer, store: kedge.CheckpointManager, library: str) -> None:
    server.delay_s = 0.05

    async def main() -> None:
        http_client = kedge.llm.async_http_client(store=store, library=library)
        async with openai.AsyncOpenAI(api_key=SECRET, base_url=f"{server.url}/v1", http_client=http_client) as sdk:
            same = [sdk.chat.completions.create(model=MODEL, messages=messages("at once")) for _ in range(20)]
            answers = await asyncio.gather(*same)
            assert {a.choices[0].message.content for a in answers} == {"2 words, such as: at once"}
            for _ in range(2):
                stream = await sdk.chat.completions.create(model=MODEL, messages=messages("s"), stream=True)
                assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "1words,suchas:s"

    asyncio.run(main())
    assert server.calls == {"at once": 1, "s": 1}


def test_asyncio_cancellation_lets_others_go_on(server: ModelServer, store: kedge.CheckpointManager) -> None:
    server.allow(0)

    async def main() -> None:
        http_client = kedge.llm.async_http_client(store=store)
        async with openai.AsyncOpenAI(api_key=SECRET, base_url=f"{server.url}/v1", http_client=http_client) as sdk:
            first = asyncio.create_task(sdk.chat.completions.create(model=MODEL, messages=messages("slow")))
            await asyncio.to_thread(server.is_asked.wait, 60)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            server.allow(None)
            await sdk.chat.completions.create(model=MODEL, messages=messages("slow"))

    asyncio.run(main())
    assert server.calls == {"slow": 2}
    assert flights(store) == []


def test_a_task_that_is_cancelled_while_its_flight_begins(
    server: ModelServer, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache.of(store)
    begin, is_asked, may_begin = cache.flights.begin, threading.Event(), threading.Event()
    begun: list[Any] = []

    def begin_late(*args: Any) -> Any:
        is_asked.set()
        assert may_begin.wait(60)
        begun.append(begin(*args))
        return begun[0]

    async def main() -> None:
        async with kedge.llm.async_http_client(store=store) as client:
            asked = {"model": MODEL, "messages": messages("x")}
            task = asyncio.create_task(client.post(f"{server.url}/v1/chat/completions", json=asked))
            await asyncio.to_thread(is_asked.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            may_begin.set()
            await wait_for_async(lambda: begun and not flights(store), "the flight is under way for ever")

    monkeypatch.setattr(cache.flights, "begin", begin_late)
    asyncio.run(main())
    assert server.calls == {}


def test_threads_that_ask_the_same_pay_once(server: ModelServer, client: Any) -> None:
    server.delay_s = 0.1
    sdks = [client(), client()]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: ask(sdks[n % 2], "the same"), range(16)))
    assert set(answers) == {"2 words, such as: the same"}
    assert server.calls == {"the same": 1}


ASK = """
import sys, time, kedge
store, url = sys.argv[1:]
pause = time.sleep  # sleep: of the product, whose waiting is to be seen
def say_and_pause(seconds):
    print("waiting", file=sys.stderr, flush=True)  # beside what is said: another thread may wait for a lock
    time.sleep = pause  # sleep: the next ones are as ever
    pause(seconds)
time.sleep = say_and_pause  # sleep: of the product, too
with kedge.llm.http_client(store=store) as client:
    print("asking", flush=True)
    asked = {"model": "m", "messages": [{"role": "user", "content": "from processes"}]}
    answer = client.post(url + "/v1/chat/completions", json=asked).json()
    print(answer["choices"][0]["message"]["content"])
"""


def asking(store: kedge.CheckpointManager, server: ModelServer) -> "subprocess.Popen[str]":
    words = [sys.executable, "-c", ASK, store.url, server.url]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "asking\n"
    return process


def test_processes_that_ask_the_same_pay_once(server: ModelServer, store: kedge.CheckpointManager) -> None:
    server.allow(0)
    first = asking(store, server)
    assert server.is_asked.wait(60)  # it is at it, and holds the flight
    second = asking(store, server)
    assert second.stderr is not None
    assert second.stderr.readline() == "waiting\n"
    server.allow(None)
    assert {each.communicate(timeout=60)[0] for each in (first, second)} == {"2 words, such as: from processes\n"}
    assert server.calls == {"from processes": 1}
    assert flights(store) == []


def test_a_process_that_died_at_its_call_is_not_waited_for(server: ModelServer, store: kedge.CheckpointManager) -> None:
    server.allow(0)
    process = asking(store, server)
    assert server.is_asked.wait(60)
    process.kill()
    process.communicate()
    assert len(store.list(FLIGHTS)) == 1
    server.allow(None)
    asked = {"model": "m", "messages": messages("from processes")}
    with kedge.llm.http_client(store=store) as http_client:
        assert http_client.post(f"{server.url}/v1/chat/completions", json=asked).status_code == 200
    assert server.calls == {"from processes": 2}
    assert flights(store) == []


def test_an_abandoned_stream_is_not_kept_and_keeps_nobody_waiting(
    server: ModelServer, store: kedge.CheckpointManager, client: Any
) -> None:
    server.delay_s = 0.05
    sdk = client()

    def stream() -> Any:
        return sdk.chat.completions.create(model=MODEL, messages=messages("long story"), stream=True)

    abandoned = stream()
    next(iter(abandoned))
    at_the_same_time = stream()  # by the same thread: it must not wait for itself
    next(iter(at_the_same_time))
    abandoned.close()
    at_the_same_time.close()
    assert store.list(JOB) == []
    assert bill(store).paid == 2
    assert len(list(stream())) == 6
    assert len(store.list(JOB)) == 1
    assert len(list(stream())) == 6
    assert server.calls == {"long story": 3}


def test_words_that_look_like_the_end_of_a_stream_are_not_one(store: kedge.CheckpointManager) -> None:
    said = json.dumps({"choices": [{"delta": {"content": "data: [DONE]\n"}}]})

    def respond(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(
            200, headers={"content-type": "text/event-stream"}, content=iter([f"data: {said}\n\n".encode()])
        )

    asked = {"url": "http://m/v1/chat/completions", "json": {"model": "m"}}
    with (
        kedge.llm.http_client(store=store, transport=httpx2.MockTransport(respond)) as http_client,
        http_client.stream("POST", **asked) as response,
    ):
        response.read()
    assert store.list(JOB) == []


def test_a_compressed_stream(store: kedge.CheckpointManager) -> None:
    body = b'data: {"model": "m", "usage": {"prompt_tokens": 3, "completion_tokens": 4}}\n\ndata: [DONE]\n\n'
    calls = []

    def respond(request: httpx2.Request) -> httpx2.Response:
        calls.append(request)
        headers = {"content-type": "text/event-stream; charset=utf-8", "content-encoding": "gzip"}
        return httpx2.Response(200, headers=headers, content=iter([gzip.compress(body)]))

    with kedge.llm.http_client(store=store, transport=httpx2.MockTransport(respond)) as http_client:
        for _ in range(2):
            with http_client.stream("POST", "http://m/v1/chat/completions", json={"model": "m"}) as response:
                assert response.read() == body
    assert len(calls) == 1
    assert bill(store).tokens_found == Tokens(3, 4)


FAILED = b'data: {"choices": [{"delta": {"content": "He"}}]}\n\ndata: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n'
HALF = b'data: {"candidates": [{"finishReason": "STOP"}, {"index": 1}]}\n\n'
REST = b'data: {"candidates": [{"index": 1, "finishReason": "STOP"}]}\n\n'


@pytest.mark.parametrize(("answer", "kept"), [(FAILED, 0), (HALF, 0), (HALF + REST, 1)])
def test_a_stream_that_failed_or_broke_off_is_not_kept(
    store: kedge.CheckpointManager, answer: bytes, kept: int
) -> None:
    headers = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, content=iter([answer])))
    with (
        kedge.llm.http_client(store=store, transport=transport) as http_client,
        http_client.stream("POST", "http://m/v1/chat/completions", json={"model": "m"}) as response,
    ):
        assert response.read() == answer
    assert len(store.list(JOB)) == kept


@pytest.mark.parametrize(
    ("wanted", "asked"), [("gzip, br;q=0.9, deflate", "gzip, deflate"), ("br", "identity"), (None, "identity")]
)
def test_no_compression_is_asked_for_that_the_library_cannot_undo(
    store: kedge.CheckpointManager, wanted: str | None, asked: str
) -> None:
    """A caller of the proxy may know more of them, and one that knows none gets none."""

    def respond(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json={"model": "m", "asked": request.headers["accept-encoding"]})

    with kedge.llm.http_client(
        store=store, transport=httpx2.MockTransport(respond), headers={"accept-encoding": "gzip, deflate"}
    ) as http_client:
        request = http_client.build_request("POST", "http://m/v1/chat/completions", json={"model": "m"})
        del request.headers["accept-encoding"]
        if wanted is not None:
            request.headers["accept-encoding"] = wanted
        assert http_client.send(request).json()["asked"] == asked


@pytest.mark.parametrize("answer", [b"not json", b'{"status": "queued"}', b'{"error": {"message": "no"}}', b"[1]"])
def test_what_is_no_whole_answer_is_not_kept(store: kedge.CheckpointManager, answer: bytes) -> None:
    def respond(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "application/json"}, content=answer)

    with kedge.llm.http_client(store=store, transport=httpx2.MockTransport(respond)) as http_client:
        assert http_client.post("http://m/v1/responses", json={"model": "m"}).content == answer
    assert store.list(JOB) == []


def test_failures_are_not_kept(server: ModelServer, store: kedge.CheckpointManager, client: Any) -> None:
    with pytest.raises(openai.InternalServerError, match="too busy"):
        ask(client(), "are you busy")
    assert store.list(JOB) == []
    assert bill(store).paid == 0
    assert ask(client(), "are you busy") == "3 words, such as: are you busy"
    assert server.calls == {"are you busy": 2}


def test_a_server_that_is_not_there(store: kedge.CheckpointManager) -> None:
    with kedge.llm.http_client(store=store, library="httpx") as http_client, pytest.raises(httpx.ConnectError):
        http_client.post("http://127.0.0.1:9/v1/chat/completions", json={"model": "m"})
    assert flights(store) == []


def test_modes(server: ModelServer, store: kedge.CheckpointManager, client: Any) -> None:
    ask(client("off"), "a question")
    assert store.jobs() == []
    ask(client("record"), "a question")
    ask(client("replay"), "a question")
    assert server.calls == {"a question": 2}
    kept = store.list(JOB)
    ask(client("refresh"), "a question")
    assert server.calls == {"a question": 3}
    assert len(store.list(JOB)) == 1
    ask(client("replay"), "a question")
    assert server.calls == {"a question": 3}
    assert len(kept) == 1
    for nonsense in ({"mode": "rewind"}, {"ttl_s": 0}, {"ttl_s": True}, {"library": "requests"}):
        with pytest.raises(kedge.Validation):
            kedge.llm.http_client(store=store, **nonsense)  # type: ignore[arg-type]


def test_a_replay_miss_shows_what_differs(server: ModelServer, client: Any) -> None:
    with pytest.raises(kedge.ReplayMiss, match="nothing is recorded in this store yet"):
        ask(client("replay"), "red green blue")
    ask(client(), "red green blue", temperature=0.5)
    ask(client(), "something else entirely", max_tokens=3, top_p=0.1)
    calls = dict(server.calls)
    with pytest.raises(kedge.ReplayMiss) as caught:
        ask(client("replay"), "red green yellow")
    text = str(caught.value)
    assert 'body.messages[0].content was "red green blue", is "red green yellow"' in text
    assert "body.temperature 0.5 is gone" in text
    with pytest.raises(kedge.ReplayMiss, match="nothing is sent when replaying"):
        client("replay").models.list()
    assert server.calls == calls


def test_the_vendors_sdks_pass_a_replay_miss_on(store: kedge.CheckpointManager) -> None:
    """They take what a client raises for a lost connection, and would try it again."""
    question: Any = messages("never recorded")
    with kedge.llm.http_client("replay", store=store) as http_client:
        sdk, other = (make(api_key="k", http_client=http_client) for make in (openai.OpenAI, anthropic.Anthropic))
        with pytest.raises(kedge.ReplayMiss):
            sdk.chat.completions.create(model=MODEL, messages=question, stream=True)
        with pytest.raises(kedge.ReplayMiss):
            other.messages.create(model="m", max_tokens=9, messages=question)
        with pytest.raises(kedge.ReplayMiss), other.messages.stream(model="m", max_tokens=9, messages=question):
            pass

    async def main() -> None:
        async with kedge.llm.async_http_client("replay", store=store) as http_client:
            for make in (openai.AsyncOpenAI, anthropic.AsyncAnthropic):
                sdk: Any = make(api_key="k", http_client=http_client)
                ask = sdk.chat.completions.create if make is openai.AsyncOpenAI else sdk.messages.create
                with pytest.raises(kedge.ReplayMiss):
                    await ask(model="m", max_tokens=9, messages=question)

    asyncio.run(main())


def test_an_answer_grows_old(server: ModelServer, store: kedge.CheckpointManager, client: Any) -> None:
    ask(client(), "news")
    ask(client(ttl_s=3600), "news")
    assert server.calls == {"news": 1}
    before = store.list(JOB)[0].id
    ask(client(ttl_s=1e-9), "news")
    assert server.calls == {"news": 2}
    assert [entry.id for entry in store.list(JOB)] != [before]  # the newer one took its place


def test_a_pinned_answer_is_replaced_and_stays(store: kedge.CheckpointManager) -> None:
    cache, request = Cache.of(store), Request("POST", "u", {"model": "m"})
    for text in ("first", "second"):
        cache.keep(request, Answer({"headers": {}, "body": text}, "m", None, Decimal(1)), is_paid=True, replace=True)
        for entry in store.list(JOB):
            store.pin(entry.id)
    assert bill(store).spent == 2
    newest = cache.find(request)
    assert newest is not None
    assert newest.content["body"] == "second"
    assert len(store.list(JOB)) == 2


def test_an_answer_stays_until_a_newer_one_is_durable(
    store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, request = Cache.of(store), Request("POST", "u", {"model": "m"})
    cache.keep(request, Answer({"headers": {}, "body": "first"}, "m", None, None))

    def refuse(saves: Any) -> Any:
        return [kedge.NoSpace("the disk is full") for _ in saves]

    with monkeypatch.context() as patch:
        patch.setattr(store, "save_many", refuse)
        with pytest.raises(kedge.NoSpace):
            cache.keep(request, Answer({"headers": {}, "body": "second"}, "m", None, None), replace=True)
    kept = cache.find(request)
    assert kept is not None
    assert kept.content["body"] == "first"


def test_what_was_paid_is_in_the_books_though_the_answer_cannot_be_kept(store: kedge.CheckpointManager) -> None:
    cache, request = Cache.of(store), Request("POST", "u", {"model": "m"})
    unreadable = Answer({"headers": {}, "body": object()}, "m", None, Decimal(1))
    with pytest.raises(kedge.UnsupportedType):
        cache.keep(request, unreadable, is_paid=True)
    assert bill(store).spent == 1


def test_samples(server: ModelServer, client: Any) -> None:
    sdk = client()
    for _ in range(2):
        ask(sdk, "a joke")
        with kedge.llm.sample(1):
            ask(sdk, "a joke")
    assert server.calls == {"a joke": 2}
    with pytest.raises(kedge.Validation), kedge.llm.sample(-1):
        pass


def test_no_credential_reaches_the_store(server: ModelServer, store: kedge.CheckpointManager, client: Any) -> None:
    sdk = client()
    tool = {"type": "mcp", "server_label": "x", "server_url": "https://t.org", "authorization": SECRET}
    ask(sdk, "hello", extra_headers={"x-more": SECRET}, extra_query={"api_key": SECRET})
    list(sdk.chat.completions.create(model=MODEL, messages=messages("stream"), stream=True))
    sdk.responses.create(model=MODEL, input="with a tool", tools=[tool])
    sdk.close()
    assert SECRET in str(server.headers)  # it was sent …
    store.close()
    files = [path for path in Path(store.url).rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in files)
    assert b"hello" in content  # … and what was asked is kept in the clear …
    for secret in (SECRET, "secret-cookie", "Bearer"):
        assert secret.encode() not in content  # … but this is not


def test_a_damaged_answer_is_asked_for_again(
    server: ModelServer, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch, client: Any
) -> None:
    ask(client(), "a question")

    def damaged(job: str, key: str) -> Any:
        if job == JOB:
            raise kedge.Corrupted("it is damaged")
        return None

    monkeypatch.setattr(store, "load_by_key", damaged)
    with pytest.warns(UserWarning, match="damaged"):
        ask(client(), "a question")
    monkeypatch.undo()
    assert ask(client(), "a question") == "2 words, such as: a question"
    assert server.calls == {"a question": 2}


def test_large_answers(store: kedge.CheckpointManager) -> None:
    body = json.dumps({"model": "m", "text": "x" * 3_000_000}).encode()

    def respond(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "application/json"}, content=body)

    with kedge.llm.http_client(store=store, transport=httpx2.MockTransport(respond)) as http_client:
        for _ in range(2):
            assert (
                http_client.post("http://m/v1/responses", json={"model": "m", "input": "y" * 100_000}).content == body
            )
    assert Cache.of(store).counters["hits"] == 1


def test_who_keeps_an_answer_first_is_followed(store: kedge.CheckpointManager) -> None:
    cache, request = Cache.of(store), Request("POST", "u", {"model": "m"})
    for text in ("first", "second"):
        cache.keep(request, Answer({"headers": {}, "body": text}, "m", None, None))
    found = cache.find(request)
    assert found is not None
    assert found.content["body"] == "first"
    assert found.cost is None


def test_flights_of_one_process(store: kedge.CheckpointManager) -> None:
    cache, request = Cache.of(store), Request("POST", "u", {"model": "m"})
    flight = cache.flights.begin(request, "me")
    assert flight is not None
    assert cache.flights.begin(request, "another") is None
    assert cache.flights.begin(request, "me") is not None  # nobody waits for itself
    flight.forget()  # as when a stream is dropped without being closed
    assert len(store.list(FLIGHTS)) == 1
    second = cache.flights.begin(request, "another")
    assert second is not None
    assert len(flights(store)) == 1, "that of the first is gone, not that of the second"
    second.end()
    assert flights(store) == []


def test_a_store_of_ones_own_is_closed_with_the_client(server: ModelServer, tmp_path: Path) -> None:
    before = threading.active_count()  # of other tests too
    with kedge.llm.http_client(store=tmp_path / "own") as http_client:
        sdk = openai.OpenAI(api_key="k", base_url=f"{server.url}/v1", http_client=http_client)
        ask(sdk, "once")
        ask(sdk, "once")
    assert threading.active_count() < before + 10
    with kedge.open(tmp_path / "own") as store:
        assert (bill(store).paid, bill(store).found) == (1, 1)


def test_totals_of_a_path(server: ModelServer, store: kedge.CheckpointManager, client: Any, tmp_path: Path) -> None:
    ask(client(), "once")
    assert kedge.llm.totals(tmp_path / "store") == kedge.llm.totals(store.url) == kedge.llm.totals(store)
    with pytest.raises(kedge.NotFound):
        kedge.llm.totals(tmp_path / "nowhere")


def test_a_cache_lives_as_long_as_its_store(server: ModelServer, tmp_path: Path) -> None:
    store = kedge.open(tmp_path / "store")
    client = openai.OpenAI(api_key="k", base_url=f"{server.url}/v1", http_client=kedge.llm.http_client(store=store))
    ask(client, "once")
    ask(client, "once")
    store.close()  # before the client, which nobody closes: what was saved is written down all the same
    with kedge.open(tmp_path / "store") as again:
        assert bill(again).found == 1
    cache = weakref.ref(Cache.of(store))
    client.close()
    del store, client
    gc.collect()
    assert cache() is None


def test_odd_texts(store: kedge.CheckpointManager) -> None:
    """Halves of characters, other encodings: what cannot be kept is handed on, what can is kept."""
    answers = iter([b'{"text": "1"}', '{"text": "2"}'.encode("utf-16"), b'{"text": "3"}'])

    def respond(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=next(answers))

    asked = [
        b'{"model": "m", "input": "\\ud800"}',
        b'{"model": "m", "input": "x"}',
        b'{"model": "\\ud800", "input": "y"}',
    ]
    with kedge.llm.http_client(store=store, transport=httpx2.MockTransport(respond)) as http_client:
        for body in asked:
            http_client.post("http://m/v1/responses", content=body)
        assert http_client.post("http://m/v1/responses", content=asked[0]).json() == {"text": "1"}
        assert http_client.post("http://m/v1/responses", content=asked[2]).json() == {"text": "3"}
    assert [entry.metadata["model"] for entry in store.list(JOB)] == ["m", "unknown"]


def test_uploads_are_not_read(store: kedge.CheckpointManager) -> None:
    """Whatever is no call goes through as it comes, however large."""

    def pieces() -> Iterator[bytes]:
        yield b"one"
        yield b"two"

    class Sender(httpx2.BaseTransport):
        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            assert not isinstance(request.stream, httpx2.ByteStream)
            return httpx2.Response(200, content=request.read())

    with kedge.llm.http_client(store=store, transport=Sender()) as http_client:
        assert http_client.post("http://m/v1/files", content=pieces()).content == b"onetwo"


def test_a_fork_does_not_write_the_books_of_its_parent(store: kedge.CheckpointManager) -> None:
    cache = Cache.of(store)
    cache.books.found(Charge("m", None, None, is_saved=True))
    child = os.fork()
    if child == 0:
        cache.settle()
        os._exit(0)
    os.waitpid(child, 0)
    assert bill(store).found == 1


def test_off_needs_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kedge.llm.http_client("off").close()
    assert list(tmp_path.iterdir()) == []
