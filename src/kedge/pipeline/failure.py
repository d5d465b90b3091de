"""How a failure is written down: one line for lists, a traceback for whoever looks closer."""

from __future__ import annotations

import traceback

MAX_ERROR_CHARACTERS = 500
MAX_TRACEBACK_CHARACTERS = 20_000


def one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip().encode("utf-8", "replace").decode()
    return " ".join(text.split())[:MAX_ERROR_CHARACTERS]


def traceback_of(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error)).encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_TRACEBACK_CHARACTERS else "…\n" + text[-MAX_TRACEBACK_CHARACTERS:]
