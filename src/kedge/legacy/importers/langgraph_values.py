"""Values as LangGraph's savers of all years wrote them. Of the names in them only LangGraph's and allowed ones import.

Before 0.2.3 values were JSON, with objects as envelopes {"lc": 2, "id": [module…, class], "method", "args", "kwargs"}.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

from kedge.errors import Validation, install_hint

from .common import clean

try:
    from langgraph.checkpoint.serde.event_hooks import register_serde_event_listener
    from langgraph.checkpoint.serde.jsonplus import LC_REVIVER, JsonPlusSerializer
    from langgraph.types import Send
except ImportError as error:
    raise Validation("this needs LangGraph", hint=install_hint("langgraph")) from error

# What an envelope may name, and what makes it of its arguments. `method` was one of each type, and never another.
_BUILDERS: dict[str, Callable[..., Any]] = {
    "builtins.bytearray": bytearray.fromhex,
    "builtins.bytes": bytes.fromhex,
    "builtins.frozenset": frozenset,
    "builtins.set": set,
    "collections.deque": deque,
    "datetime.date": date.fromisoformat,
    "datetime.datetime": datetime.fromisoformat,
    "datetime.time": time.fromisoformat,
    "datetime.timedelta": timedelta,
    "datetime.timezone": timezone,
    "decimal.Decimal": Decimal,
    "langgraph.constants.Send": Send,
    "langgraph.types.Send": Send,
    "pathlib.PosixPath": PurePosixPath,
    "pathlib.PurePosixPath": PurePosixPath,
    "uuid.UUID": UUID,
}


class Values:
    """Rebuilds values; says which types it did not build, for which plain data stands then."""

    def __init__(self, allow: tuple[str, ...]) -> None:
        allowed = [tuple(name.rpartition(".")[::2]) for name in allow]
        self._serde = JsonPlusSerializer(
            allowed_msgpack_modules=allowed or None, allowed_json_modules=[tuple(name.split(".")) for name in allow]
        )
        self._allowed = set(allow)
        self._blocked: dict[str, None] = {}
        self._stop = register_serde_event_listener(self._hear)

    def _hear(self, event: Mapping[str, Any]) -> None:
        if "blocked" in event["kind"]:
            self._blocked[f"{event['module']}.{event['name']}"] = None

    def load(self, kind: str, data: bytes) -> Any:
        if kind == "json":
            return json.loads(data, object_hook=self._revive)
        return self._serde.loads_typed((kind, data))

    def _revive(self, value: dict[str, Any]) -> Any:
        if value.get("lc") != 2 or value.get("type") != "constructor" or not isinstance(value.get("id"), list):
            return LC_REVIVER(value)
        name = ".".join(map(str, value["id"]))
        args, fields = value.get("args") or [], value.get("kwargs") or {}
        if builder := _BUILDERS.get(name):
            return builder(*args, **fields)
        if name in self._allowed:
            return self._serde.loads_typed(("json", json.dumps(value, default=_refuse).encode()))
        self._blocked[name] = None
        return fields or (args[0] if len(args) == 1 else args)

    def blocked(self) -> tuple[str, ...]:
        """Types not built since this was last asked."""
        names, self._blocked = tuple(map(clean, self._blocked)), {}
        return names

    def close(self) -> None:
        self._stop()


def _refuse(value: object) -> Any:
    raise ValueError(f"an allowed type holds a {type(value).__name__}, of which only LangGraph's newer savers know")
