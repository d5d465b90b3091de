"""The safeguards of volumes, taken out one at a time: the test that is named for each must notice."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.containers import safe_copy, volumes
from kedge.containers.runtime import pod_volumes
from tests.unit.containers import test_safe_copy, test_volumes
from tests.unit.containers.runtime import test_pod_volumes

pytestmark = [pytest.mark.faults, pytest.mark.mutant, pytest.mark.requires("root")]


_FOLLOWING = os.O_RDONLY | os.O_DIRECTORY


def _nothing(*_: object, **__: object) -> Any:
    return {}


@pytest.mark.parametrize(
    ("module", "name", "mutant", "test"),
    [
        (safe_copy, "_FOLDER", _FOLLOWING, test_safe_copy.test_a_folder_that_becomes_a_link_leads_nowhere),
        (volumes, "whole_number", lambda *_: 1 << 60, test_volumes.test_a_volume_that_is_too_large),
        (volumes, "put_back", _nothing, test_volumes.test_a_restore_that_fails_puts_them_back),
        (volumes, "put_back", _nothing, test_volumes.test_killed_at_each_step),
        (pod_volumes, "_users", _nothing, test_pod_volumes.test_who_lives_keeps_its_files),
        (pod_volumes, "_newest", _nothing, test_pod_volumes.test_the_last_of_a_pod_is_right_for_all),
    ],
)  # fmt: skip
def test_noticed(
    module: Any, name: str, mutant: Any, test: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KEDGE_RUNC_STATE", str(tmp_path / "marks"))
    wanted = test.__code__.co_varnames[: test.__code__.co_argcount]
    with kedge.open(tmp_path / "pods/store") as store:
        make: dict[str, Callable[[], Any]] = {
            "tmp_path": lambda: tmp_path,
            "monkeypatch": lambda: monkeypatch,
            "side": lambda: "target",
            "names": lambda: "bc",
            "volume": lambda: test_volumes.make_volume(tmp_path, "disk"),
            "pods": lambda: test_pod_volumes.Pods(store, tmp_path / "pods"),
        }
        given = {argument: make[argument]() for argument in wanted}
        monkeypatch.setattr(module, name, mutant)
        with pytest.raises((AssertionError, kedge.CheckpointError, pytest.fail.Exception)):
            test(**given)
