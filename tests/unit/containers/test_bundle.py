"""What the exit status of a runtime says about the checkpoint that it was to restore."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from kedge.containers import bundle as bundles
from kedge.containers import network
from kedge.containers.attempts import Attempt
from kedge.containers.bundle import Bundle
from kedge.containers.page_writer import PageWriter
from kedge.errors import CriuFailed
from kedge.files import Tree


@pytest.mark.parametrize(
    ("status", "is_verdict"), [(1, True), (137, False), (-9, False)], ids=["failed", "killed-below-a-shell", "killed"]
)
def test_a_runtime_that_was_killed_says_nothing_against_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, is_verdict: bool
) -> None:
    """Even if CRIU says that it failed: it gives up itself when the runtime that asked it is gone."""
    monkeypatch.setattr(bundles, "refuse_more", lambda *_: None)
    monkeypatch.setattr(bundles, "seeing", lambda _, command: command)
    monkeypatch.setattr(network, "namespace_of", lambda *_: nullcontext())
    monkeypatch.setattr(network, "remove_lock", lambda _: None)
    monkeypatch.setattr(Bundle, "rootfs", lambda _: None)
    monkeypatch.setattr(Bundle, "_with_hook", lambda *_: nullcontext())
    (tmp_path / "restore.log").write_text("(00.3) Error (criu/cr-restore.c:2536): Restoring FAILED.\n")
    with pytest.raises(CriuFailed) as caught:
        Bundle(tmp_path, {}).run(
            ["runc", "restore"],
            Attempt("a", tmp_path),
            lambda *_: status,
            PageWriter(Tree(tmp_path), Attempt("a", tmp_path)),
        )
    assert caught.value.is_verdict is is_verdict
