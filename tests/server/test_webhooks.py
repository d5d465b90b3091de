"""Webhooks: what is sent, to whom it is never sent, and that a crash or a refusal loses nothing."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.errors import Corrupted, LeaseHeld, NotFound, Validation
from kedge.process.workflow import Workflows
from kedge.server import create_app, webhook_post, webhooks
from kedge.server.limits import Limits
from kedge.server.tokens import ACCESS
from kedge.server.webhook_post import Message, is_public, parse_url, post, resolve, signature
from kedge.server.webhooks import Notifier, Webhooks
from tests.server.conftest import client_of
from tests.waiting import wait_for

SAME = {"Sec-Fetch-Site": "same-origin"}


class Receiver:
    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []  # the next ones; then 204
        self.url = ""

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]

    @property
    def types(self) -> list[tuple[str, str]]:
        return [(body["type"], body["data"].get("run", "")) for body in self.bodies]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    received = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(received.answers.pop(0) if received.answers else 204)
            self.send_header("location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    received.url = f"http://127.0.0.1:{server.server_address[1]}/hook?a=1"
    yield received
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def managed(place: Path, store: kedge.CheckpointManager) -> Iterator[Webhooks]:
    with kedge.open(place, namespace=ACCESS) as records:
        yield Webhooks(records, allow_private=True)


@contextmanager
def notifier_of(managed: Webhooks, store: kedge.CheckpointManager) -> Iterator[Notifier]:
    made = Notifier(lambda: managed, lambda _: store)
    yield made
    made.close()


def fail(store: kedge.CheckpointManager, key: str) -> None:
    with pytest.raises(ZeroDivisionError), kedge.run(key, store=store, progress=False) as run:
        run.step("divide", lambda: 1 // 0)


def test_what_happens_to_runs_is_sent_once_and_signed(
    managed: Webhooks, store: kedge.CheckpointManager, receiver: Receiver
) -> None:
    fail(store, "before")
    hook = managed.create(store, receiver.url, ["failed", "waiting", "finished"])
    fail(store, "bad")
    with kedge.run("good", store=store, progress=False) as run:
        run.step("one", lambda: 1)
    store.save("plain", "run failed", {})  # looks like one by its ID alone
    with pytest.raises(SystemExit), kedge.run("asks", store=store, progress=False) as run:
        run.approval("go", wait_s=0)
    with notifier_of(managed, store) as notifier:
        notifier.look()
        notifier.look()
    with notifier_of(managed, store) as notifier:  # after a start, too
        notifier.look()
    assert receiver.types == [("run.failed", "bad"), ("run.finished", "good"), ("run.waiting", "asks")]
    headers, body = receiver.got[0]
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(hook.secret.removeprefix("whsec_"))
    assert headers["webhook-signature"] == "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    assert "ZeroDivisionError" in json.loads(body)["data"]["error"]
    assert json.loads(receiver.got[2][1])["data"]["waiting"][0]["name"] == "go"
    assert [each["type"] for each in managed.record_of("default")["recent"]] == [
        "run.failed",
        "run.finished",
        "run.waiting",
    ]


def test_runs_whose_names_are_hidden_are_told_of(tmp_path: Path, receiver: Receiver) -> None:
    place, key = tmp_path / "hidden", bytes(32)
    with (
        kedge.open(place, key=key, encrypt_names=True) as store,
        kedge.open(place, namespace=ACCESS, key=key) as records,
    ):
        managed = Webhooks(records, allow_private=True)
        managed.create(store, receiver.url, ["failed"])
        fail(store, "bad")
        store.save("plain", "one", {})
        with notifier_of(managed, store) as notifier:
            notifier.look()
    assert receiver.types == [("run.failed", "bad")]


@pytest.mark.parametrize("is_hidden", [False, True])
def test_what_happens_to_executions_of_workflows_is_sent_once(
    tmp_path: Path, receiver: Receiver, is_hidden: bool
) -> None:
    place, key = tmp_path / "store", bytes(32) if is_hidden else None
    with (
        kedge.open(place, key=key, encrypt_names=is_hidden) as store,
        kedge.open(place, namespace=ACCESS, key=key) as records,
    ):
        managed = Webhooks(records, allow_private=True)
        managed.create(store, receiver.url, ["failed", "waiting", "finished"])
        workflows = Workflows(store)
        paid, broken = (workflows.start_workflow_execution("order", name) for name in ("refund", "import"))
        for name in ("pay out", "tell them"):
            workflows.create_checkpoint(paid, name, "billing", approval_required=True)
            workflows.approve_checkpoint(paid, name, True, actor="ada")
            workflows.complete_checkpoint(paid, name)
        workflows.complete_execution(paid)
        workflows.create_checkpoint(broken, "read", "reader")
        workflows.complete_checkpoint(broken, "read", {"row": 44}, success=False)
        for _ in range(2):
            with notifier_of(managed, store) as notifier:
                notifier.look()
        assert [(body["type"], body["data"]["execution"]) for body in receiver.bodies] == [
            ("execution.waiting", paid),
            ("execution.waiting", paid),
            ("execution.finished", paid),
            ("execution.failed", broken),
        ]
        data = receiver.bodies[1]["data"]
        assert (data["workflow"], data["status"]) == ("refund", "paused")
        assert [asked["name"] for asked in data["waiting"]] == ["tell them"]
        assert store.get(receiver.bodies[3]["data"]["checkpoint"]).job == broken


def test_an_execution_that_waits_for_two_tells_of_each_once(
    managed: Webhooks, store: kedge.CheckpointManager, receiver: Receiver
) -> None:
    """Each change of an execution says again what it waits for."""
    managed.create(store, receiver.url, ["waiting"])
    for waiting in (["a"], ["a", "b"], ["b"], []):
        asked = [{"name": name, "id": name} for name in waiting]
        about = {"kind": "execution", "state": "paused", "workflow": "refund", "waiting": asked}
        store.save("exec_order", "change", {}, metadata=about)
    with notifier_of(managed, store) as notifier:
        notifier.look()
    assert [body["data"]["waiting"][0]["name"] for body in receiver.bodies] == ["a", "b"]


def test_a_refused_message_comes_again_under_its_id_and_is_given_up_at_last(
    managed: Webhooks, store: kedge.CheckpointManager, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "_RETRIES_S", (0, 0))
    managed.create(store, receiver.url, ["failed"])
    fail(store, "bad")
    receiver.answers = [500, 302]  # a redirect is not followed
    for _ in range(3):
        with notifier_of(managed, store) as notifier:  # each in a new process
            notifier.look()
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert len(receiver.got) == 3
    assert managed.record_of("default")["recent"][0]["problem"] == ""
    fail(store, "worse")
    receiver.answers = [500] * 9
    with notifier_of(managed, store) as notifier:
        for _ in range(5):
            notifier.look()
    record = managed.record_of("default")
    assert (record["recent"][-1]["problem"], record["recent"][-1]["attempts"]) == ("it answered 500", 3)
    assert record["pending"] == []


def test_after_one_failure_the_other_messages_wait_for_the_next_look(
    managed: Webhooks, store: kedge.CheckpointManager, receiver: Receiver
) -> None:
    managed.create(store, receiver.url, ["failed"])
    for key in ("a", "b", "c"):
        fail(store, key)
    receiver.answers = [500]
    with notifier_of(managed, store) as notifier:
        notifier.look()
        assert len(receiver.got) == 1
        notifier.look()
    assert receiver.types == [("run.failed", "a"), ("run.failed", "b"), ("run.failed", "c")]
    assert [entry["attempts"] for entry in managed.record_of("default")["pending"]] == [1]


def test_the_log_waits_while_there_is_no_room_for_messages(
    managed: Webhooks, store: kedge.CheckpointManager, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "_PENDING", 2)
    monkeypatch.setattr(webhooks, "_RETRIES_S", (0,))
    managed.create(store, receiver.url, ["failed"])
    for key in "abcde":
        fail(store, key)
    receiver.answers = [500] * 100
    with notifier_of(managed, store) as notifier:
        for _ in range(10):
            notifier.look()
            assert len(managed.record_of("default")["pending"]) <= 2
    assert sorted(receiver.types) == [("run.failed", key) for key in "aabbccddee"]  # none was dropped untried


def test_how_far_the_log_was_read_is_kept_without_messages_too(
    managed: Webhooks, store: kedge.CheckpointManager, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "_POSITION_S", 1e9)
    managed.create(store, receiver.url, ["failed"])
    store.save("plain", "one", {})
    read = store.events(newest=True, limit=1)[-1].id
    with notifier_of(managed, store) as notifier:
        notifier.look()
        assert managed.record_of("default")["position"] == read
        store.save("plain", "two", {})
        notifier.look()
        assert managed.record_of("default")["position"] == read  # not at every look
    with notifier_of(managed, store) as notifier:
        notifier.look()
    assert managed.record_of("default")["position"] > read


def test_a_long_log_is_read_in_several_looks(
    managed: Webhooks, store: kedge.CheckpointManager, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "_PAGE", 1)
    monkeypatch.setattr(webhooks, "_PAGES", 1)
    managed.create(store, receiver.url, ["failed"])
    read = store.events(newest=True, limit=1)
    fail(store, "bad")
    with notifier_of(managed, store) as notifier:
        notifier.look()
        assert managed.record_of("default")["position"] == store.events(read[-1].id if read else 0, 1)[0].id
        for _ in store.events():
            notifier.look()
    assert receiver.types == [("run.failed", "bad")]


def test_a_new_webhook_does_not_wait_for_what_was_logged_while_there_was_none(
    managed: Webhooks, store: kedge.CheckpointManager, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of a million entries is read for minutes."""
    first = managed.create(store, receiver.url, ["failed"])
    with notifier_of(managed, store) as notifier:
        notifier.look()
        managed.delete("default", first.id)
        for n in range(20):
            store.save("plain", f"step {n}", n)
        managed.create(store, receiver.url, ["failed"])
        fail(store, "bad")
        behind = len(store.events(managed.all()[0].after, 100))
        monkeypatch.setattr(webhooks, "_PAGE", behind)
        monkeypatch.setattr(webhooks, "_PAGES", 1)
        notifier.look()
    assert receiver.types == [("run.failed", "bad")]


def test_a_crash_between_finding_and_sending_loses_nothing(
    managed: Webhooks, store: kedge.CheckpointManager, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    managed.create(store, receiver.url, ["failed"])
    fail(store, "bad")

    def killed(*_: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Webhooks, "post", killed)
        first = Notifier(lambda: managed, lambda _: store)
        with pytest.raises(KeyboardInterrupt):
            first.look()
    with notifier_of(managed, store) as second:
        second.look()  # the lease of the first is still held
        assert receiver.got == []
    first.close()
    with notifier_of(managed, store) as third:
        third.look()
    assert receiver.types == [("run.failed", "bad")]


def test_a_slow_receiver_holds_back_others_for_one_look(
    managed: Webhooks, store: kedge.CheckpointManager, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, called = [0.0], list[str]()

    def post_slowly(_: Webhooks, webhook: webhooks.Webhook, __: Message) -> str:
        clock[0] += webhooks._SEND_S * 0.6
        called.append(webhook.id)
        return ""

    slow = managed.create(store, receiver.url, ["failed"])
    for key in "abc":
        fail(store, key)
    other = managed.create(store, receiver.url, ["failed"])
    fail(store, "d")
    monkeypatch.setattr(Webhooks, "post", post_slowly)
    fake = SimpleNamespace(monotonic=lambda: clock[0], time=time.time, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(webhooks, "time", fake)
    with notifier_of(managed, store) as notifier:
        notifier.look()
        assert called == [slow.id] * 2
        notifier.look()
        assert called == [slow.id, slow.id, other.id, slow.id]


def test_a_kill_sends_few_again(
    managed: Webhooks, store: kedge.CheckpointManager, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "_UNSAVED", 2)
    managed.create(store, receiver.url, ["failed"])
    for key in "abcd":
        fail(store, key)
    post_one = Webhooks.post

    def post_three(self: Webhooks, webhook: webhooks.Webhook, message: Message) -> str:
        if len(receiver.got) == 3:
            raise KeyboardInterrupt
        return post_one(self, webhook, message)

    with monkeypatch.context() as patch:
        patch.setattr(Webhooks, "post", post_three)
        first = Notifier(lambda: managed, lambda _: store)
        with pytest.raises(KeyboardInterrupt):
            first.look()
        first.close()
    with notifier_of(managed, store) as second:
        second.look()
    assert [run for _, run in receiver.types] == ["a", "b", "c", "c", "d"]


def test_a_deleted_webhook_sends_nothing_more(
    managed: Webhooks, store: kedge.CheckpointManager, receiver: Receiver
) -> None:
    hook, other = (managed.create(store, receiver.url, ["failed"]) for _ in range(2))
    fail(store, "bad")
    receiver.answers = [500, 500]
    with notifier_of(managed, store) as notifier:
        notifier.look()
        managed.delete("default", hook.id)
        notifier.look()
        assert {entry["webhook"] for entry in managed.record_of("default")["pending"]} == {other.id}
    with pytest.raises(NotFound):
        managed.delete("other", other.id)  # of another namespace


def test_what_is_wrong_with_one_namespace_stops_no_other(
    managed: Webhooks, place: Path, store: kedge.CheckpointManager, receiver: Receiver
) -> None:
    with kedge.open(place, namespace="broken") as broken:
        managed.create(broken, receiver.url, ["failed"])
    managed.create(store, receiver.url, ["failed"])
    fail(store, "bad")

    def store_of(namespace: str) -> kedge.CheckpointManager:
        if namespace == "broken":
            raise Corrupted("its key is missing", hint="")
        return store

    notifier = Notifier(lambda: managed, store_of)
    notifier.look()
    with managed.hold("broken"):  # it was let go
        notifier.look()
    notifier.close()
    assert receiver.types == [("run.failed", "bad")]


def test_a_webhook_whose_secret_is_unreadable_stops_no_other_and_can_be_deleted(
    managed: Webhooks, store: kedge.CheckpointManager, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged, _ = (managed.create(store, receiver.url, ["failed"]) for _ in range(2))
    fail(store, "bad")
    load = kedge.CheckpointManager.load

    def load_most(self: kedge.CheckpointManager, checkpoint_id: str, *more: Any, **options: Any) -> Any:
        if checkpoint_id == damaged.checkpoint.id:
            raise Corrupted("a block is damaged", hint="")
        return load(self, checkpoint_id, *more, **options)

    monkeypatch.setattr(kedge.CheckpointManager, "load", load_most)
    with notifier_of(managed, store) as notifier:
        notifier.look()
    assert receiver.types == [("run.failed", "bad")]
    waiting = managed.record_of("default")["pending"]
    assert [(entry["webhook"], entry["problem"]) for entry in waiting] == [(damaged.id, "its secret cannot be read")]
    assert managed.send_test("default", damaged.id) == "its secret cannot be read"
    managed.delete("default", damaged.id)
    assert len(managed.all("default")) == 1


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
     "255.255.255.255", "198.18.0.1", "192.0.0.8", "::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1",
     "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::", "2001::1",
     "2001:db8::1", "168.63.129.16", "2001:20::1", "3fff::1", "4000::1", "5f00::1", "100::1", "1::1"],
)  # fmt: skip
def test_private_addresses_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_public(ipaddress.ip_address(address))
    monkeypatch.setattr(socket, "getaddrinfo", resolver("93.184.216.34", address))
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it was called"))
    url = parse_url("https://rebound.example/x", allow_private=False)
    with pytest.raises(Validation, match="private address"):
        resolve(url, allow_private=False)
    secret = webhook_post.new_secret()
    assert "private" in post("https://rebound.example/x", secret, Message("a", b"{}"), allow_private=False)


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::5db8:d822", "::ffff:1.1.1.1"])
def test_public_addresses_are_called_as_they_were_looked_up(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_public(ipaddress.ip_address(address))
    called = []
    monkeypatch.setattr(socket, "getaddrinfo", resolver(address))

    def connect(where: tuple[str, int], timeout: float) -> socket.socket:
        called.append(where)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    secret = webhook_post.new_secret()
    problem = post("https://one.example:8443/x", secret, Message("a", b"{}"), allow_private=False)
    assert (problem, called) == ("it cannot be reached: ConnectionRefusedError", [(address, 8443)])


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://one.example/x", "one.example"),
        ("https://one.example:443/x", "one.example"),
        ("https://one.example:8443/x", "one.example:8443"),
        ("http://one.example/x", "one.example"),
        ("http://one.example:443/x", "one.example:443"),
        ("https://[2606:2800:220:1::1]/x", "[2606:2800:220:1::1]"),
    ],
)
def test_the_host_is_sent_without_the_usual_port(url: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(socket, "getaddrinfo", resolver("93.184.216.34"))
    monkeypatch.setattr(webhook_post, "_connect", lambda *_: ours)
    with theirs:
        theirs.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
        assert post(url, webhook_post.new_secret(), Message("a", b"{}"), allow_private=True) == ""
        sent = theirs.recv(10_000).decode().split("\r\n")
    assert [line for line in sent if line.lower().startswith("host:")] == [f"host: {host}"]


def resolver(*addresses: str) -> Callable[..., list[Any]]:
    return lambda *_, **__: [(0, 0, 0, "", (address, 443)) for address in addresses]


@pytest.mark.parametrize(
    "url",
    ["http://example.org/", "ftp://example.org/", "https://", "https:///x", "https://user:x@example.org/",
     "https://example.org/#x", "https://example.org:0/", "https://example.org:99999/", "https://exa mple.org/",
     "https://example.org/\r\nx: y", "https://[::1", "example.org", "", "https://example.org/" + "x" * 2000],
)  # fmt: skip
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(Validation):
        parse_url(url, allow_private=False)
    assert urlsplit("https://example.org/").scheme == "https"


@pytest.mark.parametrize("scheme", ["http", "https"])  # of https the handshake never ends
def test_a_receiver_that_says_one_byte_at_a_time_is_left(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_post, "_POST_S", 2.0)
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection = listener.accept()[0]
            said = itertools.chain(b"\x16\x03\x03\x40\x00" if scheme == "https" else b"", itertools.repeat(0x48))
            with connection:
                while not stop.wait(0.01):  # limit: the pace of what drips
                    try:
                        connection.sendall(bytes([next(said)]))
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/"
        problem = post(url, webhook_post.new_secret(), Message("a", b"{}"), allow_private=True)
        stop.set()
        thread.join()
    assert problem == "it did not answer in time"


def test_addresses_that_do_not_answer_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = [0.0], []

    def connect(_: tuple[str, int], timeout: float) -> socket.socket:
        waits.append(timeout)
        clock[0] += timeout
        raise TimeoutError

    monkeypatch.setattr(socket, "getaddrinfo", resolver("93.184.216.34", "93.184.216.35", "93.184.216.36"))
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(webhook_post, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    problem = post("https://one.example/x", webhook_post.new_secret(), Message("a", b"{}"), allow_private=False)
    assert (problem, waits) == ("it did not answer in time", [5.0, 5.0])


def test_signatures_are_those_of_the_standard() -> None:
    """The example of standardwebhooks.com's reference implementations."""
    message = Message("msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}')
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    assert signature(secret, message, 1614265330) == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_admins_add_try_and_delete_them_on_the_page(
    store: kedge.CheckpointManager, receiver: Receiver, client: TestClient
) -> None:
    refused = client.post("/webhooks", data={"url": receiver.url, "events": "failed"}, headers=SAME)
    assert (refused.status_code, "needs https" in refused.text) == (422, True)
    with client_of(create_app(store, limits=Limits(private_webhooks=True))) as client:
        assert "No webhooks yet" in client.get("/webhooks").text
        nothing = client.post("/webhooks", data={"url": receiver.url}, headers=SAME)
        assert nothing.status_code == 422
        made = client.post("/webhooks", data={"url": receiver.url, "events": ["failed", "finished"]}, headers=SAME)
        assert made.text.count("whsec_") >= 1
        assert "whsec_" not in client.get("/webhooks").text
        fail(store, "bad")
        client.app.state.service.notifier.wake()  # type: ignore[attr-defined]
        wait_for(lambda: receiver.types == [("run.failed", "bad")], "the service sends it by itself")
        wait_for(lambda: "Sent last" in client.get("/webhooks").text, "and shows it")
        hook = client.app.state.service.webhooks().all("default")[0]  # type: ignore[attr-defined]
        client.post("/webhooks/test", data={"id": hook.id}, headers=SAME)
        assert receiver.types[-1] == ("test", "")
        client.post("/webhooks/delete", data={"id": hook.id}, headers=SAME)
        assert "No webhooks yet" in client.get("/webhooks").text


def test_two_workers_send_each_message_once(
    managed: Webhooks, store: kedge.CheckpointManager, receiver: Receiver
) -> None:
    managed.create(store, receiver.url, ["failed"])
    fail(store, "bad")
    with notifier_of(managed, store) as one, notifier_of(managed, store) as two:
        one.look()
        two.look()
        with pytest.raises(LeaseHeld), managed.hold("default"):
            pass
    assert len(receiver.got) == 1
