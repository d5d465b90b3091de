"""The page of a checkpoint: a branch with a changed value."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

import kedge

OWN = {"Sec-Fetch-Site": "same-origin"}


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("", "1", "has no path"),
        ("n", "", "not JSON"),
        ("n", "NaN", "the value"),
        ("n", "[" * 5000 + "]" * 5000, "nested"),
        ("other", "1", "nothing to replace"),
    ],
)
def test_a_value_that_cannot_be_changed_makes_no_branch(
    client: TestClient, store: kedge.CheckpointManager, path: str, value: str, says: str
) -> None:
    saved = store.save("job", "one", {"n": 1})
    form = {"job": "branch", "path": path, "value": value}
    answer = client.post(f"/checkpoints/{saved}/branch", data=form, headers=OWN)
    assert answer.status_code in (404, 422)
    assert says in answer.text
    assert store.list("branch") == []
