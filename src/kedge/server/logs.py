"""One JSON object per line, each with the ID of its request; on a terminal, words for people."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

from kedge.terminal.text import safe

request_id: ContextVar[str] = ContextVar("request_id", default="")

_GIVEN = re.compile(r"[A-Za-z0-9._-]{8,128}")
_random = random.Random()  # nosec B311 - an ID is no secret, and this makes no system call, which hands the GIL over
os.register_at_fork(after_in_child=_random.seed)


def choose_request_id(given: str | None) -> str:
    """The caller's own ID where it is a harmless one, else a new one."""
    return given if given is not None and _GIVEN.fullmatch(given) else f"{_random.getrandbits(64):016x}"


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current := request_id.get():
            line["request_id"] = current
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class Words(logging.Formatter):
    """For people who watch: 12:03:04  GET /jobs 200  3 ms"""

    def format(self, record: logging.LogRecord) -> str:
        facts = getattr(record, "facts", {})
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        line = f"{datetime.fromtimestamp(record.created):%H:%M:%S}  {level}{safe(record.getMessage())}"  # noqa: DTZ006 - local
        if "ms" in facts:
            line += f"  {facts['ms']:.0f} ms"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(level: str = "info", form: str = "auto") -> None:
    """Lines on stderr for everything, as "json" or "text"; "auto": text on a terminal. Uvicorn's access log is ours."""
    is_watched = sys.stderr.isatty() if form == "auto" else form == "text"
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(Words() if is_watched else JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [out]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = name != "uvicorn.access"
        logger.setLevel(logging.WARNING if is_watched else logging.NOTSET)  # `announce` says what people need


def announce(address: str) -> None:
    """For people who watch: where to look, before anything else is said."""
    if any(isinstance(handler.formatter, Words) for handler in logging.getLogger().handlers):
        print(f"Kedge serves on {address}   (stop it with Ctrl-C)", file=sys.stderr, flush=True)  # noqa: T201
