"""A checkpoint directory of ARCH: the process and its files, or neither. One of kybernate: its facts are read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.containers import snapshot
from kedge.containers.archive.arch import unpack
from kedge.containers.archive.importer import import_images
from kedge.containers.snapshot import job_of
from kedge.legacy import arch
from tests.torture.durable import watched
from tests.unit.containers.criu_writer import write_dump

pytestmark = pytest.mark.requires("root")  # removed files are devices


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    upper = tmp_path / "fs"
    (upper / "etc").mkdir(parents=True)
    (upper / "etc" / "conf").write_text("x = 1")
    os.mknod(upper / "gone", 0o600 | stat.S_IFCHR, os.makedev(0, 0))
    write_dump(tmp_path / "dump")
    assert arch.save_checkpoint_file(upper, tmp_path / "dump")
    return tmp_path / "dump"


def test_its_files_come_with_its_process(dump: Path, tmp_path: Path) -> None:
    with kedge.open("memory:") as store:
        imported = import_images(store, str(dump), key="app", spec={})
        state: Any = store.restore(job_of("container", "app"))
        assert not imported.left_out
        assert import_images(store, str(dump), key="app", spec={}).is_new is False
        with pytest.raises(kedge.NotFound):
            state["images"].read("container_files.tar")
        state["rootfs"].write_to(tmp_path / "new", exact=True)
    assert (tmp_path / "new/etc/conf").read_text() == "x = 1"
    assert stat.S_ISCHR((tmp_path / "new/gone").stat().st_mode)


def test_there_and_back(dump: Path, tmp_path: Path) -> None:
    """What is exported is a directory that ARCH takes for a finished dump, with the files it had."""
    (dump / "dump.log").unlink(missing_ok=True)
    place = tmp_path / "arch/default/app"
    with kedge.open("memory:") as store:
        first = import_images(store, str(dump), key="app", spec={}).checkpoint
        with watched() as durable:
            assert arch.export(*snapshot.load(store, first.id), place) > 0
        assert durable.lacking(place, home=tmp_path) == []
        with pytest.raises(kedge.Conflict):
            arch.export(*snapshot.load(store, first.id), place)
        (place / "stale").write_text("x")
        arch.export(*snapshot.load(store, first.id), place, overwrite=True)
    assert [path.name for path in place.parent.iterdir()] == ["app"]
    images = {path.name: path.read_bytes() for path in dump.iterdir() if path.suffix == ".img"}
    assert {path.name: path.read_bytes() for path in place.iterdir() if path.suffix == ".img"} == images
    assert not (place / "stale").exists()
    assert arch.validate_checkpoint(place)
    (tmp_path / "upper").mkdir()
    assert arch.restore_checkpoint_file(place, tmp_path / "upper")
    assert (tmp_path / "upper/etc/conf").read_text() == "x = 1"
    assert stat.S_ISCHR((tmp_path / "upper/gone").stat().st_mode)


@pytest.mark.parametrize("kind", ["directory", "file", "link", "unfinished"])
def test_an_export_replaces_nothing_but_a_checkpoint(dump: Path, tmp_path: Path, kind: str) -> None:
    place, kept = tmp_path / "place", tmp_path / "kept"
    kept.mkdir()
    (kept / "thesis").write_text("years")
    if kind == "link":
        (kept / "dump.log").write_text("Dumping finished successfully\n")
        place.symlink_to(kept)
    elif kind == "file":
        place = kept / "thesis"
    else:
        (kept / "dump.log").write_text("Error" if kind == "unfinished" else "")
        place = kept
    with kedge.open("memory:") as store:
        taken = import_images(store, str(dump), key="app", spec={}).checkpoint
        with pytest.raises(kedge.Conflict, match="no checkpoint"):
            arch.export(*snapshot.load(store, taken.id), place, overwrite=True)
        assert (kept / "thesis").read_text() == "years"
        (tmp_path / "empty").mkdir()
        arch.export(*snapshot.load(store, taken.id), tmp_path / "empty", overwrite=True)
    assert arch.validate_checkpoint(tmp_path / "empty")


def test_a_log_is_a_plain_file(tmp_path: Path) -> None:
    log = tmp_path / "dump.log"
    (tmp_path / "elsewhere").write_text("Dumping finished successfully\n")
    log.symlink_to("elsewhere")
    assert not arch.validate_checkpoint(tmp_path)
    log.unlink()
    os.mkfifo(log)
    assert not arch.validate_checkpoint(tmp_path)  # and nobody waits for a writer
    log.unlink()
    (tmp_path / "elsewhere").rename(log)
    assert arch.validate_checkpoint(tmp_path)


def test_no_cut_tar_is_whole(dump: Path, tmp_path: Path) -> None:
    whole = (dump / "container_files.tar").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(kedge.Corrupted):
            unpack(tmp_path / "cut", tmp_path / f"upper{size}")


def test_a_cut_tar_is_no_checkpoint(dump: Path) -> None:
    tar = dump / "container_files.tar"
    tar.write_bytes(tar.read_bytes()[:-9])
    with kedge.open("memory:") as store:
        with pytest.raises(kedge.Corrupted, match="container_files"):
            import_images(store, str(dump), key="app", spec={})
        assert store.jobs() == []


FACTS = {
    "namespace": "kybernate-system", "pod": "cpu-test", "container": "counter", "containerID": "4c1f", "gpuPID": 0,
    "timestamp": "20251205-013941", "checkpointPath": "/var/lib/kybernate/checkpoints/x",
}  # fmt: skip


def test_of_kybernate(tmp_path: Path) -> None:
    write_dump(tmp_path / "dump")
    facts = tmp_path / "dump/kybernate-metadata.json"
    facts.write_text(json.dumps(FACTS))
    with kedge.open("memory:") as store:
        checkpoint = import_images(store, str(tmp_path / "dump"), key="app", spec={}).checkpoint
        assert checkpoint.metadata["imported"] == {
            "format": "kybernate", "container": "kybernate-system/cpu-test/counter", "at": "20251205-013941",
        }  # fmt: skip
        state: Any = store.restore(checkpoint.job)
        with pytest.raises(kedge.NotFound):
            state["images"].read("kybernate-metadata.json")


@pytest.mark.parametrize(
    ("text", "error"),
    [(json.dumps({**FACTS, "gpuPID": 4711}), kedge.Validation), ("[]", kedge.Corrupted), ("{", kedge.Corrupted)],
)
def test_what_of_kybernate_is_refused(tmp_path: Path, text: str, error: type[kedge.CheckpointError]) -> None:
    """A process whose device memory only kybernate can put back would wait for that forever."""
    write_dump(tmp_path / "dump")
    (tmp_path / "dump/kybernate-metadata.json").write_text(text)
    with kedge.open("memory:") as store:
        with pytest.raises(error):
            import_images(store, str(tmp_path / "dump"), key="app", spec={})
        assert store.jobs() == []
