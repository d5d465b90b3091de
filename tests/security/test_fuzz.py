"""A short form of `./dev torture fuzz`: the same inputs every time."""

from __future__ import annotations

import pytest

from tests.torture.fuzz import fuzz, targets


@pytest.mark.parametrize("name", targets())
def test_mutated_input_is_read_or_refused(name: str) -> None:
    assert fuzz(name, targets()[name], seed=17, count=1500) == 1500
