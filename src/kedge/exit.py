"""The end of a program that did not close its stores: pending saves first, then the stores."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable

_saving: list[Callable[[], None]] = []
_closing: list[Callable[[], None]] = []


def save_at_end(call: Callable[[], None]) -> Callable[[], None]:
    """Call `call` when the program ends, while stores are open."""
    _saving.append(call)
    return call


def close_at_end(call: Callable[[], None]) -> Callable[[], None]:
    """Call `call` when the program ends, after all saves at the end."""
    _closing.append(call)
    return call


def _end() -> None:
    for call in [*reversed(_saving), *_closing]:
        call()


# Python calls what is registered first last. So finalizers of packs and temporary directories run after all saves.
weakref.finalize(_end, _end).detach()
atexit.register(_end)
