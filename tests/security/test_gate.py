"""Strangers at the door of the service: what they send costs nothing and opens nothing."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.server import create_app
from kedge.server.limits import Limits
from kedge.server.protocol import BoundedHttp
from kedge.server.tokens import ACCESS, Tokens
from tests.server.conftest import BASE, client_of, listening
from tests.server.test_access import ROUTES
from tests.waiting import wait_for

OURS = {"Origin": BASE, "Sec-Fetch-Site": "same-origin"}
SAVE = "/api/v1/jobs/j/checkpoints"
WITH_BODIES = sorted({(method, path) for method, path, rule in ROUTES if method not in ("GET", "HEAD")})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate") / "store"


@pytest.fixture(scope="module")
def tokens(place: Path) -> dict[str, str]:
    with kedge.open(place, namespace=ACCESS) as manager:
        made = Tokens(manager)
        return {scope: made.create(scope, scope, ["default"])[1] for scope in ("read", "write", "admin")}


@pytest.fixture(scope="module")
def client(place: Path, tokens: dict[str, str]) -> Iterator[TestClient]:
    with client_of(create_app(place)) as client:
        yield client


class Watched:
    """A body of 1 GiB, and how much of it was read."""

    def __init__(self, kind: str) -> None:
        self.read = 0
        self.headers = {"content-type": kind, **OURS}

    def __iter__(self) -> Iterator[bytes]:
        piece = b" " * (64 << 10)
        for _ in range(1 << 14):
            self.read += len(piece)
            yield piece


def call(app: Any, method: str, path: str, body: Watched, **headers: str) -> int:
    """Call the application itself: a test client reads a body before it calls."""
    import asyncio

    pieces, statuses = iter(body), []
    sent = {"host": "127.0.0.1:7420", **body.headers, **headers}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": next(pieces, b""), "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
        "client": ("127.0.0.1", 50000), "server": ("127.0.0.1", 7420), "state": {},
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return int(statuses[0])


@pytest.mark.parametrize(("method", "path"), WITH_BODIES, ids=str)
@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x"])
def test_nobody_reads_what_strangers_send(client: TestClient, method: str, path: str, kind: str) -> None:
    """Not a byte for routes with a rule; of a sign-in no more than a form."""
    body = Watched(kind)
    status = call(client.app, method, path.replace("{", "").replace("}", ""), body)
    if path in ("/login", "/api/v1/session"):
        assert body.read <= Limits().form_bytes + (64 << 10)
    else:
        assert (status, body.read) == (401, 0)


@pytest.mark.parametrize(("method", "path"), [each for each in WITH_BODIES if each != ("POST", SAVE)], ids=str)
def test_only_saves_have_large_bodies(client: TestClient, tokens: dict[str, str], method: str, path: str) -> None:
    """Whatever the scope, and however the body announces itself."""
    if path == "/api/v1/jobs/{job}/checkpoints":
        return
    filled = path.replace("{", "").replace("}", "")
    body = Watched("application/json")
    call(client.app, method, filled, body, authorization=f"Bearer {tokens['admin']}")
    assert body.read <= Limits().document_bytes + (64 << 10)
    announced = Watched("application/json")
    announced.headers["content-length"] = str(Limits().document_bytes + 1)
    assert call(client.app, method, filled, announced, authorization=f"Bearer {tokens['admin']}") == 413
    assert announced.read == 0


def test_a_reader_cannot_send_a_state(client: TestClient, tokens: dict[str, str]) -> None:
    body = Watched("multipart/form-data; boundary=x")
    assert call(client.app, "POST", SAVE, body, authorization=f"Bearer {tokens['read']}") == 403
    assert body.read == 0


def test_slow_strangers_take_no_place(place: Path, tokens: dict[str, str]) -> None:
    """As many slow bodies as there are slots: those with a token are served, and strangers know at once."""
    app = create_app(place, limits=Limits(concurrent=3))
    with listening(app, http=BoundedHttp) as url, ExitStack() as stack:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for _ in range(6):
            slow = stack.enter_context(socket.create_connection(address, timeout=60))
            slow.sendall(f"POST {SAVE} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5000\r\n\r\n{{".encode())
            assert slow.recv(12) == b"HTTP/1.1 401"
        headers = {"Authorization": f"Bearer {tokens['read']}"}
        answer = httpx.get(f"{url}/api/v1/jobs", headers=headers, timeout=60)
        assert answer.status_code == 200
        assert not app.state.service.slots


def test_who_was_refused_and_goes_on_sending_loses_the_connection(
    place: Path, tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedHttp, "linger_s", 0.1)
    with listening(create_app(place), http=BoundedHttp) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=60) as caller:
            caller.sendall(f"POST {SAVE} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5000\r\n\r\n{{".encode())
            data = b""
            while piece := caller.recv(1 << 16):  # until the service ends it
                data += piece
    assert data.startswith(b"HTTP/1.1 401")


def drip(address: tuple[str, int], head: str, has_ended: Callable[[socket.socket], bool]) -> None:
    """A body that comes byte by byte, each in time, until the other side has enough."""
    with socket.create_connection(address, timeout=0.05) as caller:  # limit: of each look for an answer
        caller.sendall(head.encode())

        def send() -> bool:
            try:
                caller.sendall(b"x")
            except OSError:
                return True
            return has_ended(caller)

        wait_for(send, "the body may take for ever")


def _is_answered(caller: socket.socket) -> bool:
    try:
        return caller.recv(12) == b"HTTP/1.1 408"
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    "head",
    [
        f"POST {SAVE} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n",
        "POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-www-form-urlencoded\r\n",
        "POST /api/v1/retention/plan HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n",
    ],
    ids=["save", "sign in", "other"],
)
def test_a_body_has_one_deadline(place: Path, tokens: dict[str, str], head: str) -> None:
    """Not one for each piece."""
    head += f"Authorization: Bearer {tokens['admin']}\r\nContent-Length: 10000\r\n\r\n"
    app = create_app(place, limits=Limits(receive_s=0.5, form_s=0.5))
    with listening(app, http=BoundedHttp) as url:
        drip(("127.0.0.1", int(url.rpartition(":")[2])), head, _is_answered)


def test_a_stop_waits_for_no_body(place: Path, tokens: dict[str, str]) -> None:
    """Bodies that never end do not keep a service that stops: `listening` ends when they are refused."""
    app = create_app(place)
    head = f"POST {SAVE} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {tokens['write']}\r\nContent-Length: 5000\r\n\r\n{{"
    with ExitStack() as stack, listening(app, http=BoundedHttp) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        for _ in range(4):
            stack.enter_context(socket.create_connection(address, timeout=60)).sendall(head.encode())
        wait_for(lambda: len(app.state.service.slots) == 4, "the bodies are not awaited")
        app.state.service.is_draining = True  # as the signal does


def test_sign_ins_have_few_places_of_their_own(place: Path, tokens: dict[str, str]) -> None:
    with client_of(create_app(place, limits=Limits(sign_ins=0))) as client:
        assert client.post("/login", data={"token": "x"}, headers=OURS).status_code == 503
        assert client.get("/api/v1/jobs", headers={"Authorization": f"Bearer {tokens['read']}"}).status_code == 200


# Sessions


FOREIGN = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Origin": "http://127.0.0.1:9999"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.parametrize("path", ["/login", "/api/v1/session"])
def test_no_other_site_signs_a_browser_in(
    client: TestClient, tokens: dict[str, str], path: str, headers: dict[str, str]
) -> None:
    """Into the account of an attacker, who would then see what is saved there."""
    body: dict[str, Any] = {"json" if "session" in path else "data": {"token": tokens["write"]}}
    answer = client.post(path, headers=headers, follow_redirects=False, **body)
    assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)


@pytest.fixture
def browser(place: Path, tokens: dict[str, str]) -> Iterator[TestClient]:
    """Signed in."""
    with client_of(create_app(place)) as client:
        assert client.post("/api/v1/session", json={"token": tokens["write"]}, headers=OURS).status_code == 204
        yield client


def test_a_cookie_is_no_token(browser: TestClient, tokens: dict[str, str]) -> None:
    """Every port of this host gets it from the browser: it opens no API as a bearer."""
    [(name, session)] = browser.cookies.items()
    assert tokens["write"] not in session
    assert browser.get("/api/v1/whoami").json()["actor"] == "write"
    browser.cookies.clear()
    assert browser.get("/api/v1/whoami", headers={"Authorization": f"Bearer {session}"}).status_code == 401
    for cookie in (tokens["write"], session[:-1] + "!", "ks_" + "0" * 12 + "_" + "x" * 43, ""):
        assert browser.get("/api/v1/whoami", headers={"Cookie": f"{name}={cookie}"}).status_code == 401


def test_a_session_ends_when_its_owner_signs_out(browser: TestClient) -> None:
    [(name, session)] = browser.cookies.items()
    assert browser.delete("/api/v1/session", headers=OURS).status_code == 204
    assert browser.get("/api/v1/whoami", headers={"Cookie": f"{name}={session}"}).status_code == 401


def test_a_session_ends_with_its_token(place: Path, tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.server.tokens.REMEMBERED_S", 0.0)
    with kedge.open(place, namespace=ACCESS) as manager, client_of(create_app(place)) as browser:
        text = Tokens(manager).create("short", "read", ["default"])[1]
        browser.post("/api/v1/session", json={"token": text}, headers=OURS)
        assert browser.get("/api/v1/whoami").status_code == 200
        Tokens(manager).revoke("short")
        assert browser.get("/api/v1/whoami").status_code == 401


def test_a_session_expires(place: Path, tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    monkeypatch.setattr("kedge.server.sessions.LIFETIME", timedelta(seconds=-1))
    with client_of(create_app(place)) as browser:
        browser.post("/api/v1/session", json={"token": tokens["read"]}, headers=OURS)
        [(name, session)] = browser.cookies.items()
        assert browser.get("/api/v1/whoami", headers={"Cookie": f"{name}={session}"}).status_code == 401


def test_sessions_are_kept_as_digests_only(browser: TestClient, place: Path) -> None:
    [session] = browser.cookies.values()
    stored = b"".join(file.read_bytes() for file in place.rglob("*") if file.is_file())
    assert session.split("_", 2)[2].encode() not in stored


def test_over_https_no_other_host_sets_the_cookie(place: Path, tokens: dict[str, str]) -> None:
    app = create_app(place, root_path="/kedge")
    with TestClient(app, base_url="https://127.0.0.1", client=("127.0.0.1", 1)) as client:
        ours = {"Origin": "https://127.0.0.1"}
        answer = client.post("/api/v1/session", json={"token": tokens["read"]}, headers=ours)
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("__Host-kedge-session-")
    assert "Secure" in cookie
    assert "Path=/;" in cookie
    assert "Domain" not in cookie


# Proxies, names


@pytest.mark.parametrize(
    "header",
    ["X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-IP", "Via", "Forwarded", "CF-Connecting-IP"],
)
def test_a_proxy_makes_nobody_an_administrator(tmp_path: Path, header: str) -> None:
    """Without tokens callers on this machine may do everything; whoever comes through a proxy is not on it."""
    with client_of(create_app(tmp_path / "open")) as client:
        assert client.get("/api/v1/jobs").status_code == 200
        assert client.get("/api/v1/jobs", headers={header: "1.1 proxy"}).status_code == 403


def test_nor_does_one_that_says_nothing(tmp_path: Path) -> None:
    """nginx speaks HTTP/1.0 to what is behind it, unless it is told otherwise."""
    with listening(create_app(tmp_path / "open"), http=BoundedHttp) as url, ExitStack() as stack:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        caller = stack.enter_context(socket.create_connection(address, timeout=60))
        caller.sendall(b"GET /api/v1/jobs HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
        assert caller.recv(12) == b"HTTP/1.1 403"


@pytest.mark.parametrize("name", ["checkpoint_id", "self", "tags", "method", "actor", "namespace", "cls", "kind"])
def test_a_tag_may_have_any_name(client: TestClient, tokens: dict[str, str], name: str) -> None:
    headers = {"Authorization": f"Bearer {tokens['write']}"}
    saved = client.post(SAVE, json={"step": "s", "state": 1}, headers=headers).json()["id"]
    answer = client.patch(f"/api/v1/checkpoints/{saved}/tags", json={"tags": {name: "v"}}, headers=headers)
    assert (answer.status_code, answer.json()["tags"]) == (200, {name: "v"})


@pytest.mark.parametrize("name", ["Größe", "重み", "\u202egpj.exe", 'a"b\\c', "a\r\nX-Injected: 1", "é" * 300])
def test_a_download_may_have_any_name(client: TestClient, tokens: dict[str, str], name: str) -> None:
    headers = {"Authorization": f"Bearer {tokens['write']}"}
    saved = client.post(SAVE, json={"step": "s", "state": {name: 1}}, headers=headers).json()["id"]
    query = {"path": name, "format": "json"}
    answer = client.get(f"/api/v1/checkpoints/{saved}/download", params=query, headers=headers)
    assert (answer.status_code, answer.json()) == (200, 1)
    assert answer.headers["content-disposition"].startswith("attachment; ")
    assert "x-injected" not in answer.headers


def test_two_applications_share_no_memory(tmp_path: Path) -> None:
    """What one remembers of a checkpoint, another with the same ID never shows."""
    apps = [create_app(tmp_path / name) for name in ("one", "other")]
    assert apps[0].state.page is not apps[1].state.page
    assert apps[0].state.service.slots is not apps[1].state.service.slots
