"""Which branches of a tree a pattern takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kedge import codec
from kedge.codec.selection import Branches
from kedge.errors import NotFound

STATE = {
    "keys": 1, "keys2": {"a": 2}, "a": {"b": {"c": 3, "cd": 4}, "b2": [5, {"c": 6}]}, "": {"": 7}, "x/y": {"z": 8},
    "results": [{"keys": 9}], "[odd]*": {"?": 10}, ("pair", 1): {"b": 11},
}  # fmt: skip
PATTERNS = [
    "keys", "keys*", "key?", "a/b", "a/b/c", "a/*/c", "*/c", "*", "a/b2/1/c", "/", "/*", "x/y", "x/y/z", "x/*", "*keys",
    "[[]odd[]][*]", "[a-b]/b", "a*c", "**", "no", "a/no", "", "a/b/", "*[)]/b", "(*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_branch_is_left_out_unwalked_only_if_nothing_in_it_matches(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = codec.encode(STATE)

    def outcome(load: Callable[[], object]) -> object:
        try:
            return load()
        except NotFound as error:
            return error.message

    def load() -> object:
        return codec.decode(encoded.tree, lambda _: pytest.fail("it has no buffers"), only=[pattern, "a/b/cd"])

    quick = outcome(load)
    with monkeypatch.context() as patch:
        patch.setattr(Branches, "_may_match_below", lambda *_: True)
        assert outcome(load) == quick


def test_what_cannot_match_is_not_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    matches = Branches._matches

    def watched(self: Branches, path: str, patterns: list[str]) -> bool:
        looked_at.append(path)
        return matches(self, path, patterns)

    monkeypatch.setattr(Branches, "_matches", watched)
    encoded = codec.encode({"keys": b"k", "results": list(range(1000)), "more": {"keys": 1}})
    assert codec.decode(encoded.tree, lambda _: pytest.fail("it has no buffers"), only=["keys"]) == {"keys": b"k"}
    assert looked_at == ["", "keys", "results", "more"]
