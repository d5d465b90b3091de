"""safetensors files: written for the real package to read, read as it writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.errors import Corrupted, UnsupportedType, Validation

pytestmark = [pytest.mark.requires("module:torch", "module:safetensors"), pytest.mark.xdist_group("torch")]


def run(*words: str) -> Any:
    from click.testing import CliRunner

    from kedge.cli import cli

    result = CliRunner().invoke(cli, list(words))
    assert result.exit_code == 0, result.output
    return result


def test_there_and_back(tmp_path: Path) -> None:
    import numpy as np
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file

    weight = torch.randn(20, 30)
    state = {
        "model": {"weight": weight, "tied": weight.T, "half": torch.randn(7).bfloat16(), "eight": torch.ones(3).char()},
        "empty": torch.zeros(0, 4),
        "numbers": [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3))],
        "epoch": 7,
        "when": (1, 2),
    }
    store, file = str(tmp_path / "store"), str(tmp_path / "out.safetensors")
    with kedge.open(store) as manager:
        manager.save("job", "one", state)
    run("export", "--store", store, "job", file)
    loaded = load_file(file)
    assert torch.equal(loaded["model.tied"], weight.T)
    assert torch.equal(loaded["model.half"], state["model"]["half"])
    assert loaded["empty"].shape == (0, 4)
    assert np.array_equal(loaded["numbers.1"].numpy(), np.arange(6).reshape(2, 3))
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["kedge"])
    assert about["state"]["epoch"] == 7
    assert about["state"]["model"]["half"]["tensor"] == "model.half"
    assert about["state"]["model"]["weight"]["fields"] == {"tensor": "model.weight"}
    run("save", "--store", store, "back", "from a file", file)
    with kedge.open(store) as manager:
        back: Any = manager.restore("back")
    assert back.keys() == loaded.keys()
    assert all(back[name].dtype is loaded[name].dtype and torch.equal(back[name], loaded[name]) for name in loaded)


def test_what_has_no_place_there_is_refused(tmp_path: Path) -> None:
    import io

    import torch

    from kedge.integrations.safetensors import write_file

    with kedge.open("memory:") as store:
        for state, error in (
            ({"t": torch.ones(2, dtype=torch.complex128)}, UnsupportedType),
            ({"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}, Validation),
            ({"big": bytes(2 << 20)}, Validation),
        ):
            with pytest.raises(error):
                write_file(store, store.save("job", "one", state), io.BytesIO())


def test_damaged_files(tmp_path: Path) -> None:
    from kedge.integrations.safetensors import read_file

    def file(header: Any, data: bytes = b"") -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / "x.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        return path

    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert read_file(file({"t": good}, bytes(8)))["t"].shape == (2,)
    for header, data in (
        ({"t": good}, bytes(7)),
        ({"t": good}, bytes(9)),
        ({"t": {**good, "shape": [3]}}, bytes(8)),
        ({"t": {**good, "shape": [-2]}}, bytes(8)),
        ({"t": {**good, "data_offsets": [8, 16]}}, bytes(16)),
        ({"t": good, "u": good}, bytes(8)),
        ([1], b""),
        (b"{", b""),
        (b"[" * 100_000, b""),
    ):
        with pytest.raises(Corrupted):
            read_file(file(header, data))
    (tmp_path / "y").write_bytes(b"\xff" * 9)
    with pytest.raises(Corrupted):
        read_file(tmp_path / "y")
    with pytest.raises(UnsupportedType):
        read_file(file({"t": {**good, "dtype": "X1"}}, bytes(8)))
