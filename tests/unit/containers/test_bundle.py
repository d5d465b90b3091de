"""What the exit status of a runtime says about the checkpoint that it was to restore."""

import json
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from kedge.containers import bundle as bundles
from kedge.containers import network
from kedge.containers.attempts import Attempt
from kedge.containers.bundle import Bundle, give_images, run_watched
from kedge.containers.criu import leftovers
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


def test_a_restore_is_watched_and_its_end_is_noticed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks, nobody sleeps while the runtime may have ended: `Popen.wait` with a timeout would."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    looks = []

    def look(pid: int, held: Sequence[int]) -> None:
        looks.append((os.path.exists(f"/proc/{pid}"), held))
        if len(looks) == 1:
            fifo.write_text("end")

    def sleep(_: float) -> None:
        raise AssertionError("it sleeps")

    monkeypatch.setattr(leftovers, "LOOK_S", 0.001)
    monkeypatch.setattr(leftovers, "end_if_criu_was_killed", look)
    monkeypatch.setattr(time, "sleep", sleep)
    with (tmp_path / "lock").open("w") as lock:
        held = [lock.fileno()]
        assert run_watched(["sh", "-c", 'read -r word < "$0"; exit 3', str(fifo)], held) == 3
    assert looks[0] == (True, held)


def test_a_hook_is_in_the_configuration_for_a_while(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    with Bundle(tmp_path, {})._with_hook({"path": "/a/hook"}):
        assert json.loads(config.read_bytes())["hooks"]["createRuntime"][-1] == {"path": "/a/hook"}
    assert config.read_text() == "{}"
    assert [*tmp_path.iterdir()] == [config]


def test_what_is_known_about_an_attempt_stays_known(tmp_path: Path) -> None:
    attempt = Attempt("a", tmp_path)
    attempt.describe(first=1)
    attempt.describe(second=2)
    assert Attempt("a", tmp_path).facts() == {"first": 1, "second": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["attempt.json"]


def test_images_are_given_without_copying_them(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "pages-1.img").write_bytes(b"pages")
    for _ in range(2):
        give_images(tmp_path / "images", tmp_path / "target")
        assert (tmp_path / "target" / "pages-1.img").samefile(tmp_path / "images" / "pages-1.img")
