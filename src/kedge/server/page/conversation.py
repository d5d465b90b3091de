"""The messages in a state, read as a conversation: of LangGraph threads, agent SDKs' sessions, or any chat history."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from kedge.codec import BufferSummary, TypeSummary
from kedge.errors import Corrupted, NotFound
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, CheckpointLevel
from kedge.terminal.tree import describe

from .markdown import Block, Span, blocks
from .states import Outlines

_SHOWN = 50  # messages at once
_CHARACTERS = 8000  # of a message
_PLACES = ("channel_values/messages", "channel_values", "messages", "items", "events", "state/messages", "state")
_LOOKED_AT = 1000  # values of one place
_ROLES = {"human": "user", "ai": "assistant", "model": "assistant", "function": "tool", "developer": "system"}
_INTERRUPT = "__interrupt__"  # the channel in which LangGraph asks a person
_CALLS = ("function_call", "tool_call", "tool_use")
_RESULTS = ("function_response", "function_call_output", "tool_result")
_TEXTS = ("text", "output_text", "input_text", "refusal", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that the model wants to be called."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    role: str  # system, user, assistant, tool, or what the framework says
    name: str
    text: str
    calls: Sequence[Call] = ()
    left_out: int = 0  # characters

    @property
    def blocks(self) -> Sequence[Block]:
        """Its text as its writer meant it; what a tool said is data."""
        return [Block([Span(self.text)])] if self.role == "tool" else blocks(self.text)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of one checkpoint, from `start` on."""

    checkpoint: Checkpoint
    messages: Sequence[Message]
    start: int
    total: int
    asks: Sequence[str] = ()  # what the agent wants to hear from a person before it goes on

    @property
    def earlier(self) -> int:
        return max(0, self.start - _SHOWN)

    @property
    def later(self) -> int:
        return self.start + _SHOWN


def newest_conversation(
    store: CheckpointManager, outlines: Outlines, job: str, start: int | None = None
) -> Conversation | None:
    """That of a thread's newest checkpoint; None where there is none."""
    newest = store.list(job, level=CheckpointLevel.STEP, limit=1)
    if not newest:
        return None
    try:
        latest = conversation_in(newest[0], outlines.open(store, newest[0].id).outline, start)
        asks = list(islice(_asks(store, outlines, newest[0]), 5))
    except (Corrupted, NotFound):
        return None  # the page of the checkpoint says what is wrong; or it was deleted meanwhile
    if latest is None and not asks:
        return None
    known = latest or Conversation(newest[0], (), 0, 0)
    return Conversation(known.checkpoint, known.messages, known.start, known.total, asks)


def conversation_in(checkpoint: Checkpoint, outline: object, start: int | None = None) -> Conversation | None:
    """The messages of a state: the last ones, or those from `start` on."""
    raw = _raw_messages(outline)
    if not raw:
        return None
    first = max(0, len(raw) - _SHOWN) if start is None else min(start, len(raw))
    messages = [message for entry in raw[first : first + _SHOWN] if (message := _message(entry)) is not None]
    return Conversation(checkpoint, messages, first, len(raw))


def _raw_messages(outline: object) -> list[object]:
    for place in _PLACES:
        value: object = outline
        for name in place.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        lists = [value] if isinstance(value, list) else []
        if isinstance(value, Mapping):
            lists = [entries for entries in islice(value.values(), _LOOKED_AT) if isinstance(entries, list)]
        for entries in lists:
            if entries and all(_message(item) is not None for item in (entries[0], entries[-1])):
                return list(entries)
    return []


def _asks(store: CheckpointManager, outlines: Outlines, newest: Checkpoint) -> Iterator[str]:
    """What a LangGraph thread was interrupted for: among the writes of its newest checkpoint."""
    for write in store.list(newest.job, tags={"of": newest.id.partition("@")[0]}, limit=20):
        outline = outlines.open(store, write.id).outline
        task = outline.get("task") if isinstance(outline, Mapping) else None
        channels = task.get("channels") if isinstance(task, Mapping) else None
        values = outline.get("values") if isinstance(outline, Mapping) else None
        if not isinstance(channels, list) or not isinstance(values, Mapping):
            continue
        for place, channel in enumerate(channels):
            if isinstance(channel, list) and channel[-1:] == [_INTERRUPT]:
                yield from map(_in_words, _interrupts(values.get(str(place))))


def _interrupts(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple):
        for member in value:
            yield from _interrupts(member)
    elif isinstance(value, TypeSummary):
        yield value.fields.get("value")
    elif value is not None:
        yield value


def _message(raw: object) -> Message | None:
    """A message as its framework wrote it; None for what is none."""
    if isinstance(raw, TypeSummary):
        value = raw.fields.get("value", raw.fields)
        fields = value[0] if isinstance(value, list | tuple) and value else value
        kind = raw.name.rpartition(".")[2]
        if not isinstance(fields, Mapping) or not kind.removesuffix("Chunk").endswith("Message"):
            return None
        role = str(fields.get("role") or kind.removesuffix("Chunk").removesuffix("Message").lower())
        return _made(role, fields)
    if not isinstance(raw, Mapping):
        return None
    item = raw.get("type")
    if item in (*_CALLS, *_RESULTS):  # an item of its own: OpenAI's Responses
        return _made("assistant" if item in _CALLS else "tool", {"content": [raw]})
    said_by = raw.get("role") or raw.get("author") or item
    has_content = any(name in raw for name in ("content", "parts", "tool_calls"))
    return _made(said_by, raw) if isinstance(said_by, str) and has_content else None


def _made(role: str, fields: Mapping[str, object]) -> Message:
    content = fields.get("content", fields.get("parts"))
    if isinstance(content, Mapping) and isinstance(content.get("parts"), list):  # an event of Google's ADK
        role, content = str(content.get("role") or role), content["parts"]
    texts, calls, is_result = [], [], False
    for block in content if isinstance(content, list) else [content]:
        text, call = _block(block)
        texts += [text] if text else []
        calls += [call] if call else []
        is_result |= isinstance(block, Mapping) and any(block.get("type") == n or n in block for n in _RESULTS)
    named = fields.get("tool_calls")
    for named_call in named if isinstance(named, list) else ():
        if (call := _call(named_call)) is not None and call not in calls:
            calls.append(call)
    text = "\n\n".join(texts)
    shown = text[:_CHARACTERS]
    role = "tool" if is_result else _ROLES.get(role.lower(), role)
    return Message(role, str(fields.get("name") or ""), shown, calls, len(text) - len(shown))


def _block(block: object) -> tuple[str, Call | None]:
    """A part of a message: (text, call of a tool)."""
    if block is None or isinstance(block, str):
        return block or "", None
    if not isinstance(block, Mapping):
        return _in_words(block), None
    if (call := _call(block)) is not None:
        return "", call
    for name in (*_TEXTS, "output", "content"):
        if isinstance(block.get(name), str):
            return block[name], None
    for name in _RESULTS:
        if isinstance(block.get(name), Mapping):
            return _in_words(block[name].get("response", block[name])), None
    if block.get("type") == "tool_result":
        return _in_words(block.get("content")), None
    kind = block.get("type") or next(iter(block), "")
    return f"[{kind}]", None  # a picture, a sound, a file: the state shows it


def _call(block: object) -> Call | None:
    if not isinstance(block, Mapping):
        return None
    inner = next((block[name] for name in ("function", "function_call") if isinstance(block.get(name), Mapping)), block)
    is_call = inner is not block or block.get("type") in _CALLS
    arguments = next((inner[name] for name in ("args", "arguments", "input") if name in inner), None)
    if not is_call or not isinstance(inner.get("name"), str):
        return None
    return Call(inner["name"], arguments if isinstance(arguments, str) else _in_words(arguments))


def _in_words(value: object) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, BufferSummary | TypeSummary):
        return describe(value)[0]
    try:
        return json.dumps(value, ensure_ascii=False, default=lambda unknown: describe(unknown)[0])[:_CHARACTERS]
    except (TypeError, ValueError, RecursionError):  # keys that JSON has not, or a value in itself
        return describe(value)[0]
