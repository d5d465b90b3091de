"""What errors say."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest

import kedge


def test_the_hint_follows_the_message() -> None:
    error = kedge.Conflict("job a exists", hint="choose another name")
    assert str(error) == "job a exists — choose another name"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(kedge.Conflict("job a exists")) == "job a exists"


def test_a_name_that_is_refused_is_called_a_name() -> None:
    with kedge.open("memory:") as store:
        with pytest.raises(kedge.InvalidName, match=r"^'a b' is not a valid job name — use 1 to 128 characters"):
            store.save("a b", "x", 1)
        with pytest.raises(kedge.InvalidName, match=r"^'a b' is not a valid checkpoint ID — "):
            store.get("a b")


def test_a_buffer_in_memory_has_content_but_no_path(tmp_path: Path) -> None:
    with kedge.open("memory:") as store:
        for buffer in (io.BytesIO(b"x"), io.StringIO("x")):
            with pytest.raises(kedge.UnsupportedType, match=r'state\["b"\] has type _io\.\w+, .*buffer\.getvalue\(\)'):
                store.save("job", "step", {"b": buffer})
        with (tmp_path / "a").open("w") as file, pytest.raises(kedge.UnsupportedType, match=r"kedge\.File\(path\)"):
            store.save("job", "step", {"b": file})


def test_an_object_store_alone_is_no_store() -> None:
    with pytest.raises(kedge.Validation, match=r"s3://bucket/x has no index.*blobs=s3://bucket/x"):
        kedge.open("s3://bucket/x")
