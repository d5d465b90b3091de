"""A copy between stores, killed anywhere, leaves a whole beginning and goes on when it is run again."""

from pathlib import Path

import pytest

from tests.torture.copies import die_everywhere, die_following
from tests.torture.ledger import Violation

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def test_a_copy_that_is_killed_goes_on(tmp_path: Path) -> None:
    assert die_everywhere(tmp_path) >= 6


@pytest.mark.mutant
def test_copies_in_another_order_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(Violation):
        die_everywhere(tmp_path, mutant="copies not in order")


def test_a_follower_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    assert die_following(tmp_path)["killed"] >= 4


@pytest.mark.mutant
def test_a_place_noted_too_early_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(Violation):
        die_following(tmp_path, mutant="place noted before the copies")
