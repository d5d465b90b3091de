"""What changed between two states, by path.

    trees    are compared as outlines: nothing of the application is constructed (I7)
    arrays   that are equal are recognised by the digests in the manifests, without reading them;
             others are read where their chunks differ, verified (I2), and compared in pieces

So the memory needed does not grow with the arrays. Paths are '/'-joined, as in `load(only=…)`; list items have their
number in the newer state, removed ones that in the older. The order of a dictionary is not compared.
"""

from __future__ import annotations

from kedge.errors import Validation
from kedge.model import Checkpoint
from kedge.store.local import LocalStore

from .changes import ArrayDelta, Change, ChangeKind, Diff, TextDelta
from .comparison import Comparison
from .states import StoredState
from .values import brief

__all__ = ["ArrayDelta", "Change", "ChangeKind", "Diff", "TextDelta", "brief", "diff"]

MAX_CHANGES = 1000


def diff(
    store: LocalStore, a: tuple[Checkpoint, bytes], b: tuple[Checkpoint, bytes], *, max_changes: int = MAX_CHANGES
) -> Diff:
    """Return what changed from checkpoint `a` to checkpoint `b`, each given with its manifest."""
    if isinstance(max_changes, bool) or not isinstance(max_changes, int) or max_changes < 1:
        raise Validation(f"max_changes={max_changes!r} shows nothing", hint="use a whole number of at least 1")
    old, new = StoredState(store, *a), StoredState(store, *b)
    comparison = Comparison(old, new, max_changes)
    try:
        comparison.compare("", old.outline, new.outline)
    except RecursionError as error:
        raise Validation(
            "the states are too deep for what is left of the Python stack",
            hint="compare them from a function that is called less deeply",
        ) from error
    return comparison.result(a[0].id, b[0].id)
