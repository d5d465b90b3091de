"""The safeguards of claims and of sleep, taken out one at a time: the test that is named for each must notice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.containers import hibernation, snapshot
from kedge.containers.runtime import claims
from kedge.model import Lease
from tests.unit.containers import test_pods as tests

pytestmark = [pytest.mark.faults, pytest.mark.mutant]


def _any_slot(real: Callable[..., Lease]) -> Callable[..., Lease]:
    def take(*given: Any, **more: Any) -> Lease:
        return real(*given, **{**more, "only_empty": False})

    return take


def _unfenced(_: object) -> Callable[..., Any]:
    return lambda manager, mark, root, identity: mark


def _never(_: object) -> Callable[..., bool]:
    return lambda *_: False


def _nobody(_: object) -> Callable[..., list[Lease]]:
    return lambda *_: []


def _awake(_: object) -> Callable[..., None]:
    return lambda *_: None


def _any_namespace(_: object) -> Callable[..., Any]:
    return lambda manager, wish: snapshot.find(manager, "container", wish.restore)


@pytest.mark.parametrize(
    ("module", "name", "mutant", "test"),
    [
        (claims, "take", _any_slot, tests.test_who_began_anew_adds_to_no_history),
        (claims, "ensure", _unfenced, tests.test_who_lost_its_claim_is_kept_by_itself),
        (claims, "_is_gone", _never, tests.test_who_is_gone_holds_nothing),
        (claims, "_alive_here", _nobody, tests.test_who_lives_here_loses_nothing),
        (claims, "_is_leaving", _never, tests.test_who_is_frozen_elsewhere_is_waited_for),
        (hibernation, "asleep", _awake, tests.test_what_sleeps_is_refused_until_it_is_woken),
        (tests, "find_for", _any_namespace, tests.test_where_a_container_begins),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_noticed(
    module: Any,
    name: str,
    mutant: Callable[..., Any],
    test: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("KEDGE_RUNC_STATE", str(tmp_path / "marks"))
    monkeypatch.setenv("KEDGE_RUNC", "/bin/false")
    monkeypatch.setattr(module, name, mutant(getattr(module, name)))
    wanted = test.__code__.co_varnames[: test.__code__.co_argcount]
    with kedge.open("memory:") as store:
        given = {"store": store, "monkeypatch": monkeypatch, "tmp_path": tmp_path}
        with pytest.raises((AssertionError, kedge.CheckpointError, pytest.fail.Exception)):
            test(**{name: given[name] for name in wanted})
