"""A server that speaks the protocols of OpenAI and Anthropic and answers with made-up text: for trying things offline.

    python examples/model_server.py --port 8000

GET /calls says how often each prompt was asked. What it answers depends on the prompt alone.
"""

import argparse
import gzip
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class ModelServer(ThreadingHTTPServer):
    """Use as a context manager: it serves until the end of the block."""

    daemon_threads = True

    def __init__(self, port: int = 0, *, delay_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", port), _Call)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.delay_s = delay_s
        self.calls: Counter[str] = Counter()
        self.headers: list[dict[str, str]] = []
        self.is_asked = threading.Event()
        self._allowed: int | None = None
        self._lock = threading.Condition()

    def count(self, prompt: str, headers: dict[str, str]) -> int:
        with self._lock:
            self.calls[prompt] += 1
            self.headers.append(headers)
            self.is_asked.set()
            return self.calls[prompt]

    def allow(self, answers: int | None) -> None:
        """Give so many answers, then let callers wait; None: as many as are asked for."""
        with self._lock:
            self._allowed = answers
            self._lock.notify_all()

    def wait_for_turn(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._allowed != 0)
            if self._allowed is not None:
                self._allowed -= 1

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up in the middle of an answer is nothing to talk about."""


class _Call(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ModelServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(dict(self.server.calls))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = _prompt_of(asked)
        number = self.server.count(prompt, {name.lower(): value for name, value in self.headers.items()})
        self.server.wait_for_turn()
        time.sleep(self.server.delay_s)
        words = prompt.split()
        text = f"{len(words)} words, such as: {' '.join(sorted(words, key=len)[-3:])}"
        if "busy" in words and number == 1:
            self._send({"error": {"message": "too busy", "type": "server_error"}}, status=503)
        elif self.path.endswith("/messages"):
            self._answer(asked, *_anthropic(asked, words, text))
        elif self.path.endswith("/responses"):
            self._answer(asked, *_responses(asked, words, text))
        elif self.path.endswith("/embeddings"):
            usage = {"prompt_tokens": len(words), "total_tokens": len(words)}
            data = [{"object": "embedding", "index": 0, "embedding": [float(len(word)) for word in words[:3]]}]
            self._send({"object": "list", "data": data, "model": asked["model"], "usage": usage})
        else:
            self._answer(asked, *_openai(asked, words, text))

    def _answer(self, asked: dict[str, Any], whole: dict[str, Any], events: list[tuple[str, object]]) -> None:
        if not asked.get("stream"):
            self._send(whole)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("set-cookie", "session=secret-cookie")
        self.send_header("connection", "close")
        self.end_headers()
        for name, event in events:
            text = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write((f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode())
            self.wfile.flush()
            time.sleep(self.server.delay_s / 10)
        self.close_connection = True

    def _send(self, document: object, status: int = 200) -> None:
        content = gzip.compress(json.dumps(document).encode())
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-encoding", "gzip")
        self.send_header("content-length", str(len(content)))
        self.send_header("set-cookie", "session=secret-cookie")
        self.send_header("x-request-id", "req-1")
        self.end_headers()
        self.wfile.write(content)


def _prompt_of(asked: dict[str, Any]) -> str:
    if "messages" not in asked:
        return str(asked.get("input"))
    content = asked["messages"][-1]["content"]
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def _openai(asked: dict[str, Any], words: list[str], text: str) -> tuple[dict[str, Any], list[tuple[str, object]]]:
    usage = {"prompt_tokens": len(words), "completion_tokens": 7, "total_tokens": len(words) + 7}
    about = {"id": "chatcmpl-1", "created": 1, "model": asked["model"]}
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    whole = {**about, "object": "chat.completion", "choices": [choice], "usage": usage}
    events: list[tuple[str, object]] = [
        ("", {**about, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": piece}}]})
        for piece in text.split(" ")
    ]
    if (asked.get("stream_options") or {}).get("include_usage"):
        events.append(("", {**about, "object": "chat.completion.chunk", "choices": [], "usage": usage}))
    return whole, [*events, ("", "[DONE]")]


def _responses(asked: dict[str, Any], words: list[str], text: str) -> tuple[dict[str, Any], list[tuple[str, object]]]:
    part = {"type": "output_text", "text": text, "annotations": []}
    output = [{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}]
    usage = {
        "input_tokens": len(words),
        "output_tokens": 7,
        "total_tokens": len(words) + 7,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    whole = {
        "id": "resp_1", "object": "response", "created_at": 1, "model": asked["model"], "status": "completed",
        "output": output, "usage": usage, "error": None, "parallel_tool_calls": True, "tool_choice": "auto",
        "tools": [],
    }  # fmt: skip
    done = {"type": "response.completed", "sequence_number": 1, "response": whole}
    return whole, [("response.completed", done)]


def _anthropic(asked: dict[str, Any], words: list[str], text: str) -> tuple[dict[str, Any], list[tuple[str, object]]]:
    usage = {"input_tokens": len(words), "output_tokens": 7, "cache_read_input_tokens": 100}
    whole = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": asked["model"],
        "content": [{"type": "text", "text": text}], "stop_reason": "end_turn", "stop_sequence": None, "usage": usage,
    }  # fmt: skip
    start = {**whole, "content": [], "usage": {**usage, "output_tokens": 1}}
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}}
    events = [{"type": "message_start", "message": start}, block, delta, {"type": "content_block_stop", "index": 0}]
    return whole, [(str(e["type"]), e) for e in (*events, end, {"type": "message_stop"})]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds each answer takes")
    chosen = parser.parse_args()
    with ModelServer(chosen.port, delay_s=chosen.delay) as server:
        print(server.url, flush=True)
        threading.Event().wait()
