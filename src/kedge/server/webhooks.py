"""Webhooks: tell other services when a run or a workflow execution fails, waits for somebody, or finishes.

They are checkpoints of the job `webhooks` in the namespace of the tokens, which is never served. For each namespace one
worker follows the log of changes, under a lease, and keeps in one record how far it came and what is still to be sent:
so a message is sent at least once, also after a crash, always under the same ID.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from kedge.errors import CheckpointError, LeaseHeld, NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, Event, Lease, RunStatus

from .tokens import own_job
from .webhook_post import Message, new_secret, parse_url, post, resolve

JOB = "webhooks"
EVENTS = ("failed", "waiting", "finished")
_MOST = 50  # webhooks of a namespace
_LOOK_S = 5.0  # for webhooks, and for changes where there are some
_PAGE, _PAGES = 500, 20  # events that are read at once, and how often in one look
_PENDING, _RECENT = 1000, 20  # messages that are kept
_SEND_S = 30.0  # for the messages of a namespace in one look
_UNSAVED = 10  # messages that may be sent again after a crash
_POSITION_S = 60.0  # how often the position alone is saved
_RETRIES_S = (5, 30, 120, 600, 3600, 3 * 3600, 12 * 3600)
_LEASE_S = 30.0
_STATUS_IDS = (
    *(f"run-{status}_" for status in (RunStatus.FAILED, RunStatus.PAUSED, RunStatus.COMPLETED)),
    "checkpoint_",  # any checkpoint, where names are hidden
)
_EXECUTIONS = "exec_"  # how their jobs begin
_log = logging.getLogger("kedge.server")


@dataclass(frozen=True, slots=True)
class Webhook:
    id: str
    url: str
    namespace: str
    events: tuple[str, ...]
    after: int  # events of the log up to this one are not sent
    secret: str  # "" if it cannot be read
    checkpoint: Checkpoint

    @classmethod
    def of(cls, checkpoint: Checkpoint, secret: str) -> Webhook:
        about: Any = checkpoint.metadata
        return cls(
            about["id"], about["url"], about["namespace"], tuple(about["events"]), about["after"], secret, checkpoint
        )


class Webhooks:
    """Those of a store. `records` is open in the namespace of the tokens."""

    def __init__(self, records: CheckpointManager, *, allow_private: bool) -> None:
        self._records = records
        self._allow_private = allow_private

    def create(self, store: CheckpointManager, url: str, events: Sequence[str]) -> Webhook:
        """One for the namespace of `store`, from now on."""
        resolve(parse_url(url, allow_private=self._allow_private), allow_private=self._allow_private)
        wanted = [event for event in EVENTS if event in events]
        if not wanted or len(wanted) < len(set(events)):
            raise Validation(f"events {', '.join(events)}", hint=f"choose from {', '.join(EVENTS)}")
        if len(self.all(store.namespace)) >= _MOST:
            raise Validation(f"there are {_MOST} webhooks already", hint="delete some")
        newest = store.events(limit=1, newest=True)
        about = {
            "id": secrets.token_hex(6),
            "url": url,
            "namespace": store.namespace,
            "events": wanted,
            "after": newest[-1].id if newest else 0,
        }
        state = {"secret": new_secret()}
        made = self._records.save(JOB, str(about["id"]), state, metadata=about, tags={"namespace": store.namespace})
        return Webhook.of(self._records.get(made), state["secret"])

    def all(self, namespace: str | None = None) -> list[Webhook]:
        """Oldest first."""
        tags = None if namespace is None else {"namespace": namespace}
        webhooks = []
        for checkpoint in self._records.list(JOB, tags=tags):
            try:
                state: Any = self._records.load(checkpoint.id)
            except NotFound:
                continue  # deleted meanwhile
            except CheckpointError as error:
                _log.warning("webhooks: the secret of %s cannot be read: %s", checkpoint.step, error)
                state = {}
            webhooks.append(Webhook.of(checkpoint, str(state.get("secret", ""))))
        return webhooks

    def get(self, namespace: str, webhook_id: str) -> Webhook:
        for webhook in self.all(namespace):
            if webhook.id == webhook_id:
                return webhook
        raise NotFound(f"there is no webhook {webhook_id[:80]}", hint="the page of webhooks shows them")

    def delete(self, namespace: str, webhook_id: str) -> None:
        self._records.delete(JOB, self.get(namespace, webhook_id).checkpoint.id)

    def send_test(self, namespace: str, webhook_id: str) -> str:
        """ "" when the receiver took a message of the type `test`, else why not."""
        webhook = self.get(namespace, webhook_id)
        body = {"type": "test", "timestamp": _now(), "data": {"namespace": namespace}}
        return self.post(webhook, Message(f"test_{secrets.token_hex(8)}", json.dumps(body).encode()))

    def post(self, webhook: Webhook, message: Message) -> str:
        if not webhook.secret:
            return "its secret cannot be read"
        return post(webhook.url, webhook.secret, message, allow_private=self._allow_private)

    def record_of(self, namespace: str) -> dict[str, Any]:
        """How far a namespace's log was read, what is to be sent, and what was sent last."""
        latest = self._records.load_latest(own_job(JOB, namespace))
        state = latest[1] if latest is not None else {}
        return {
            "position": None,
            "pending": [],
            "recent": [],
            "known": [],
            **(state if isinstance(state, dict) else {}),
        }

    def save_record(self, namespace: str, record: dict[str, Any], lease: Lease) -> None:
        self._records.save(own_job(JOB, namespace), "sent", record, lease=lease)
        self._records.cleanup(own_job(JOB, namespace), 2)

    def hold(self, namespace: str) -> AbstractContextManager[Lease]:
        return self._records.lease(own_job(JOB, namespace), _LEASE_S)


class Notifier:
    """Sends what webhooks ask for, from a thread of its own."""

    def __init__(self, webhooks: Callable[[], Webhooks], store_of: Callable[[str], CheckpointManager]) -> None:
        self._webhooks = webhooks
        self._store_of = store_of
        self._held: dict[str, tuple[AbstractContextManager[Lease], Lease]] = {}  # by namespace
        self._records: dict[str, dict[str, Any]] = {}
        self._next_s: dict[str, float] = {}  # when to save a position alone (monotonic)
        self._called_s: dict[str, float] = {}  # when a webhook was called last (monotonic)
        self._stop, self._woken = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stop.clear()
        self._thread = threading.Thread(target=self._work, name="kedge-webhooks", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        """What is being sent is waited for; the rest is sent by another worker, or after the next start."""
        self._stop.set()
        self._woken.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._let_go(set(self._held))

    def _work(self) -> None:
        while not self._stop.is_set():
            self._woken.wait(_LOOK_S)
            self._woken.clear()
            if self._stop.is_set():
                break
            try:
                self.look()
            except Exception:  # noqa: BLE001 - the store may be gone for a while: this thread must not be
                _log.exception("webhooks: the next look is in %g s", _LOOK_S)
                self._let_go(set(self._held))

    def look(self) -> None:
        """Find what happened since the last look, and send what is due."""
        webhooks = self._webhooks()
        by_namespace: dict[str, list[Webhook]] = {}
        for webhook in webhooks.all():
            by_namespace.setdefault(webhook.namespace, []).append(webhook)
        self._let_go(self._held.keys() - by_namespace.keys())
        for namespace, own in by_namespace.items():
            if self._stop.is_set():
                return
            try:
                self._serve(webhooks, namespace, own)
            except LeaseHeld:
                self._let_go({namespace})  # another worker does it
            except Exception:  # noqa: BLE001 - of this namespace alone: the others are not to suffer
                _log.exception("webhooks of %s: the next look is in %g s", namespace, _LOOK_S)
                self._let_go({namespace})

    def _let_go(self, namespaces: set[str]) -> None:
        for namespace in namespaces:
            self._records.pop(namespace, None)
            self._next_s.pop(namespace, None)
            held = self._held.pop(namespace, None)
            if held is not None:
                with suppress(CheckpointError):
                    held[0].__exit__(None, None, None)

    def _serve(self, webhooks: Webhooks, namespace: str, own: list[Webhook]) -> None:
        if namespace not in self._held:
            holding = webhooks.hold(namespace)
            self._held[namespace] = holding, holding.__enter__()
            self._records[namespace] = webhooks.record_of(namespace)
        record = self._records[namespace]
        # What was before all of them is not read, however long nobody wanted to know.
        record["position"] = max(record["position"] or 0, min(entry.after for entry in own))
        messages, position = _messages(self._store_of(namespace), own, record, self._stop)
        has_moved, record["position"] = position > record["position"], position
        record["pending"] = [*record["pending"], *messages]
        record["known"] = [*record["known"], *(entry["id"] for entry in messages)][-_PENDING:]
        if messages or (has_moved and time.monotonic() >= self._next_s.get(namespace, 0.0)):
            self._save(webhooks, namespace)  # before they are sent: a crash loses none
        self._send(webhooks, namespace, own)

    def _save(self, webhooks: Webhooks, namespace: str) -> None:
        webhooks.save_record(namespace, self._records[namespace], self._held[namespace][1])
        self._next_s[namespace] = time.monotonic() + _POSITION_S

    def _send(self, webhooks: Webhooks, namespace: str, own: list[Webhook]) -> None:
        """Send what is due, for a limited time, the receiver first that was called longest ago.

        After one failure, the receiver's other messages wait for the next look.
        """
        record, known, failing = self._records[namespace], {hook.id: hook for hook in own}, set()
        pending = {entry["id"]: entry for entry in record["pending"] if entry["webhook"] in known}
        unsaved, now, end_s = len(record["pending"]) - len(pending), time.time(), time.monotonic() + _SEND_S
        due = [entry for entry in pending.values() if entry["next"] <= now]
        for entry in sorted(due, key=lambda entry: self._called_s.get(entry["webhook"], 0.0)):
            if self._stop.is_set() or time.monotonic() >= end_s:
                break
            if entry["webhook"] in failing:
                continue
            problem = webhooks.post(known[entry["webhook"]], Message(entry["id"], entry["body"].encode()))
            self._called_s[entry["webhook"]] = time.monotonic()
            entry = {**entry, "attempts": entry["attempts"] + 1, "problem": problem}
            if problem:
                failing.add(entry["webhook"])
            if problem and entry["attempts"] <= len(_RETRIES_S):
                pending[entry["id"]] = {**entry, "next": time.time() + _RETRIES_S[entry["attempts"] - 1]}
            else:
                del pending[entry["id"]]
                sent = {name: entry[name] for name in ("webhook", "id", "type", "run", "attempts", "problem")}
                record["recent"] = [*record["recent"], {**sent, "at": _now()}][-_RECENT:]
            record["pending"], unsaved = list(pending.values()), unsaved + 1
            if unsaved >= _UNSAVED:
                self._save(webhooks, namespace)
                unsaved = 0
        record["pending"] = list(pending.values())
        if unsaved:
            self._save(webhooks, namespace)


def _messages(
    store: CheckpointManager, own: list[Webhook], record: dict[str, Any], stop: threading.Event
) -> tuple[list[dict[str, object]], int]:
    """What to send because of the log behind the record's position, and how far it was read.

    It is read no further than there is room for messages: each one is tried before it is forgotten. A run may record
    the same more than once, say when it begins to wait and when it ends: what was made before is not made again.
    """
    position, room = record["position"], _PENDING - len(record["pending"])
    known = {*record["known"], *(entry["id"] for entry in record["pending"])}
    messages: dict[str, dict[str, object]] = {}
    for _ in range(_PAGES):
        events = store.events(position, _PAGE)
        for event in events:
            if stop.is_set():
                return list(messages.values()), position
            made = _of_event(store, own, event, known)
            if made and len(messages) + len(made) > room:
                return list(messages.values()), position
            messages.update(made)
            known.update(made)
            position = event.id
        if len(events) < _PAGE:
            break
    return list(messages.values()), position


def _of_event(store: CheckpointManager, own: list[Webhook], event: Event, known: set[str]) -> dict[str, dict[str, Any]]:
    """The messages because of one event, by their IDs."""
    messages = {}
    for news in _news(store, event):
        about = {"type": f"{news.subject}.{news.kind}", "run": news.record.job, "body": json.dumps(news.body(store))}
        for webhook in own:
            message_id = news.id_for(webhook)
            if news.kind in webhook.events and event.id > webhook.after and message_id not in known:
                sent = {"attempts": 0, "next": 0.0, "problem": ""}
                messages[message_id] = {"webhook": webhook.id, "id": message_id, **about, **sent}
    return messages


@dataclass(frozen=True, slots=True)
class _News:
    """What a checkpoint says of a run, or of an execution of a workflow."""

    subject: str  # run, execution
    kind: str  # of EVENTS
    record: Checkpoint
    status: str
    waiting: Any = None

    def id_for(self, webhook: Webhook) -> str:
        """The same for all records that tell the same of one session of a run, or of one execution."""
        facts = [webhook.id, self.kind, self.record.job, self.record.metadata.get("session"), self.waiting]
        return "msg_" + hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:32]

    def body(self, store: CheckpointManager) -> dict[str, Any]:
        record, about = self.record, self.record.metadata
        data: dict[str, Any] = {"namespace": store.namespace, self.subject: record.job}
        data |= {"checkpoint": record.id, "status": self.status}
        if self.subject == "execution":
            data["workflow"] = about.get("workflow")
        if (error := about.get("error")) and self.kind == "failed":
            data["error"] = str(error)[:2000]
        if self.kind == "waiting":
            data["waiting"] = self.waiting
        return {"type": f"{self.subject}.{self.kind}", "timestamp": record.created_at.isoformat(), "data": data}


def _news(store: CheckpointManager, event: Event) -> Iterator[_News]:
    """What an event is worth telling. Its names alone rule most events out."""
    if event.action != "save" or not event.checkpoint:
        return
    if not event.checkpoint.startswith(_STATUS_IDS) and not (event.job or "").startswith(_EXECUTIONS):
        return
    try:
        record = store.get(event.checkpoint)
    except NotFound:
        return
    about: dict[str, Any] = dict(record.metadata)
    subject = about.get("kind")
    if subject not in ("run", "execution"):
        return
    status, waiting = about.get("status" if subject == "run" else "state"), about.get("waiting")
    if status in (RunStatus.FAILED, RunStatus.COMPLETED):
        yield _News(subject, "failed" if status == RunStatus.FAILED else "finished", record, status)
    elif status == RunStatus.PAUSED and waiting and subject == "run":
        yield _News(subject, "waiting", record, status, waiting)
    elif status == RunStatus.PAUSED and isinstance(waiting, list):  # said again by each change: told of one by one
        for asked in waiting:
            yield _News(subject, "waiting", record, status, [asked])


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
