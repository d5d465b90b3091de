"""The values everything else speaks of."""

import copy
import pickle
from dataclasses import FrozenInstanceError, astuple, replace

import pytest

from kedge import Checkpoint
from kedge.model import CheckpointId, CheckpointLevel, CheckpointStatus, new_checkpoint, to_datetime

VALUES = (
    CheckpointId("step_1_00000000"), "job", 1, "step", CheckpointLevel.STEP, None, to_datetime(1_700_000_000_000_001),
    CheckpointStatus.CREATED, 3, 2, "d" * 64, "msgpack", "1.0", {"a": "b"}, False, {"m": 1},
)  # fmt: skip


def test_a_checkpoint_that_is_made_quickly_is_one_like_any_other() -> None:
    quick, usual = new_checkpoint(*VALUES), Checkpoint(*VALUES)
    assert type(quick) is Checkpoint
    assert (quick, repr(quick), astuple(quick)) == (usual, repr(usual), VALUES)
    assert replace(quick, seq=2) == replace(usual, seq=2)
    assert copy.copy(quick) == pickle.loads(pickle.dumps(quick)) == usual
    with pytest.raises(FrozenInstanceError):
        quick.seq = 2  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        quick.other = 2  # type: ignore[attr-defined]


def test_a_checkpoint_that_is_made_quickly_has_all_its_fields() -> None:
    with pytest.raises(TypeError):
        new_checkpoint(*VALUES[:-1])
