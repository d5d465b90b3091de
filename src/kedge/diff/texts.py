"""Long texts: the lines that differ."""

from __future__ import annotations

import difflib

from kedge.store.rope import common_length

from .changes import TextDelta
from .values import SHOWN_CHARACTERS, clip

_LONG_TEXT = 80  # characters from which a diff says more than both texts
_MATCHED_LINES = 2000
_SHOWN_LINES = 60
_CONTEXT_LINES = 3


def is_long(old: str, new: str) -> bool:
    return max(len(old), len(new)) > _LONG_TEXT or "\n" in old or "\n" in new


def text_delta(old: str, new: str) -> TextDelta:
    a, b = old.split("\n"), new.split("\n")
    if len(a) == len(b) == 1:
        return _line_delta(old, new)
    same = common_length(a, b)
    end = common_length(a[same:][::-1], b[same:][::-1])
    same, end = max(same - _CONTEXT_LINES, 0), max(end - _CONTEXT_LINES, 0)
    a, b = a[same : len(a) - end], b[same : len(b) - end]
    left_out = max(len(a) - _MATCHED_LINES, 0) + max(len(b) - _MATCHED_LINES, 0)
    a, b = a[:_MATCHED_LINES], b[:_MATCHED_LINES]
    lines: list[str] = []
    for group in difflib.SequenceMatcher(None, a, b).get_grouped_opcodes(_CONTEXT_LINES):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        lines.append(f"@@ -{same + i1 + 1},{i2 - i1} +{same + j1 + 1},{j2 - j1} @@")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [" " + line for line in a[i1:i2]]
            else:
                lines += ["-" + line for line in a[i1:i2]]
                lines += ["+" + line for line in b[j1:j2]]
    left_out += max(len(lines) - _SHOWN_LINES, 0)
    return TextDelta(tuple(clip(line) for line in lines[:_SHOWN_LINES]), left_out)


def _line_delta(old: str, new: str) -> TextDelta:
    """Return the part of two long lines around their first difference."""
    at = common_length(old, new)
    start = max(at - SHOWN_CHARACTERS // 4, 0)
    lead = "…" if start else ""
    lines = [f"-{lead}{clip(old[start:])}", f"+{lead}{clip(new[start:])}"]
    return TextDelta((f"@@ character {at + 1:,} @@", *lines))
