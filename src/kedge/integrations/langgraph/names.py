"""From LangGraph's free-form names to Kedge's, and back.

    thread "a b", root        job  thread:a+20b
    thread "a b", "agent:1"   job  thread:a+20b@agent:1
    checkpoint "1f…"          ID   1f…@<8 hex of the job>      the same LangGraph ID may exist in several threads
    memories ("users", "é")   job  memory:users@+C3+A9

A byte outside the grammar is written as + and two hex digits. What gets too long keeps its beginning, and ends in ++
and a hash; the original then stands in the metadata of each checkpoint.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import get_checkpoint_id

from kedge.errors import Validation
from kedge.model import CheckpointId, is_utf8

PREFIX = "thread:"
MEMORY = "memory:"
_MOST = 128
_MOST_THREAD = 72
_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")
_ESCAPE = re.compile(r"\+([0-9A-F]{2})")
_PLAIN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Address:
    """What a config names: a thread, a namespace in it, and perhaps a checkpoint there."""

    thread: str
    namespace: str = ""
    checkpoint_id: str | None = None

    @classmethod
    def of(cls, config: RunnableConfig) -> Address:
        chosen = config["configurable"]
        return cls(str(chosen["thread_id"]), chosen.get("checkpoint_ns") or "", get_checkpoint_id(config) or None)

    @property
    def job(self) -> str:
        return job_of(self.thread, self.namespace)

    def config(self, checkpoint_id: str) -> RunnableConfig:
        """The config of another checkpoint of the same history."""
        chosen = {"thread_id": self.thread, "checkpoint_ns": self.namespace, "checkpoint_id": checkpoint_id}
        return {"configurable": chosen}


def job_of(thread_id: str, namespace: str = "") -> str:
    thread = prefix_of(thread_id)
    if not namespace and isinstance(namespace, str):
        return thread
    if not isinstance(namespace, str) or not is_utf8(namespace):
        raise Validation(f"checkpoint_ns={namespace!r}", hint="use the namespace LangGraph gave")
    return f"{thread}@{_part(namespace, _MOST - len(thread) - 1)}"


def prefix_of(thread_id: str) -> str:
    """The job of a thread's root; those of its namespaces begin with it and @."""
    if not isinstance(thread_id, str) or not thread_id or not is_utf8(thread_id):
        raise Validation(f"thread_id={thread_id!r}", hint='use text: {"configurable": {"thread_id": "customer-7"}}')
    return PREFIX + _part(thread_id, _MOST_THREAD)


@lru_cache(maxsize=1024)
def names_of(job: str) -> tuple[str, str] | None:
    """(thread, namespace) of a job; None when it was too long to be told from the job's name."""
    if "++" in job:
        return None
    thread, _, namespace = job.removeprefix(PREFIX).partition("@")
    return _decode(thread), _decode(namespace)


def id_of(job: str, checkpoint_id: str) -> CheckpointId:
    if not isinstance(checkpoint_id, str) or not checkpoint_id:
        raise Validation(f"checkpoint_id={checkpoint_id!r}", hint="use the ID LangGraph gave")
    plain = checkpoint_id if _PLAIN_ID.fullmatch(checkpoint_id) else "x" + _hash(checkpoint_id, 32)
    return CheckpointId(f"{plain}@{_hash(job, 8)}")


def plain_id(checkpoint_id: str) -> str:
    """What `id_of` was made of, where that was a plain ID."""
    return checkpoint_id.partition("@")[0]


def memory_job(namespace: tuple[str, ...]) -> str:
    parts = [_escape(part) for part in namespace]
    return MEMORY + _shorten("@".join(parts), _MOST - len(MEMORY), "\0".join(namespace))


def memory_prefix(namespace: tuple[str, ...]) -> str:
    """What the job of every namespace that begins with this one begins with; those of others may, too."""
    return MEMORY + _kept("@".join(_escape(part) for part in namespace), _MOST - len(MEMORY))


@lru_cache(maxsize=1024)
def _part(text: str, most: int) -> str:
    return _shorten(_escape(text), most, text)


def _escape(text: str) -> str:
    return _UNSAFE.sub(lambda match: "".join(f"+{byte:02X}" for byte in match[0].encode()), text)


def _shorten(encoded: str, most: int, text: str) -> str:
    return encoded if len(encoded) <= most else f"{_kept(encoded, most)}++{_hash(text, 24)}"


def _kept(encoded: str, most: int) -> str:
    """What is left of a name that is shortened."""
    return encoded[: most - 26].rstrip("+")


def _decode(encoded: str) -> str:
    data = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), encoded)
    return data.encode("latin-1").decode()


@lru_cache(maxsize=1024)
def _hash(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:digits]
