"""Archives of every engine: in, out and in again without loss; shown alike from a file and from the store."""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import stat
import tarfile
from pathlib import Path

import pytest
import zstandard

import kedge
from kedge.cli.commands.container_archives import export_command, import_command, inspect_command
from kedge.containers import snapshot
from kedge.containers.archive import oci
from kedge.containers.archive.export import export
from kedge.containers.archive.importer import import_archive
from kedge.containers.archive.layout import FORMATS
from kedge.containers.archive.tar import Member
from kedge.containers.archive.unpack import unpack
from kedge.containers.inspection import inspect_archive, inspect_stored
from kedge.containers.protobuf import encode
from kedge.errors import Conflict, Validation
from kedge.manager import CheckpointManager
from tests.unit.containers.archive_writer import archive_files, tar_of
from tests.unit.containers.criu_writer import write_dump

pytestmark = pytest.mark.requires("root")
_MANAGERS = {"podman": "libpod", "cri": "cri-o", "containerd": None}


def _tar(files: dict[str, bytes]) -> bytes:
    return tar_of([(Member(name.encode(), size=len(data), mode=0o600), data) for name, data in files.items()])


def _archive(path: Path, format: str = "podman") -> Path:
    path.write_bytes(_tar(archive_files(_MANAGERS[format])))
    return path


@pytest.fixture
def store(tmp_path: Path) -> CheckpointManager:
    return kedge.open(tmp_path / "store")


def _tree(store: CheckpointManager, identity: str) -> dict[str, tuple[object, ...]]:
    """All that matters of the changed files."""
    rootfs = snapshot.load(store, identity)[1].rootfs
    assert rootfs is not None
    found = {}
    for entry in rootfs.entries:
        data = rootfs.read(entry.path) if entry.kind in ("file", "hard link") else b""
        times = entry.mtime_ns if entry.kind != "character device" and entry.path != "etc" else 0
        details = (rootfs.attributes(entry.path), rootfs.ranges(entry.path))
        found[entry.path] = (entry.kind, entry.target, entry.mode, entry.uid, entry.gid, times, data, *details)
    return found


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.ZstdCompressor().compress])
def test_compression_is_found_out_and_names_do_not_matter(tmp_path: Path, compress: object) -> None:
    path = tmp_path / "checkpoint.txt"
    path.write_bytes(compress(_tar(archive_files())))  # type: ignore[operator]
    (tmp_path / "unpacked").mkdir()
    found = unpack(path, tmp_path / "unpacked")
    assert found.format == "podman"
    assert found.config.name == "counter"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("origin", ["podman", "containerd"])
def test_in_out_and_in_again(tmp_path: Path, store: CheckpointManager, origin: str, format: str) -> None:
    first = import_archive(store, _archive(tmp_path / "first.tar", origin))
    assert first.archive_format == origin
    assert first.left_out == ()
    checkpoint, taken = snapshot.load(store, first.checkpoint.id)
    assert (checkpoint.job, taken.id, taken.network["mode"]) == ("container:counter", "d2b88c2931", "own")
    assert taken.descriptors == ("/dev/null", "pipe:[1]", "pipe:[2]")
    export(checkpoint, taken, tmp_path / "out", format=format)
    second = import_archive(store, tmp_path / "out", key="again")
    again = snapshot.load(store, second.checkpoint.id)[1]
    assert _tree(store, second.checkpoint.id) == _tree(store, first.checkpoint.id)
    assert {entry.path for entry in again.images.entries} == {entry.path for entry in taken.images.entries}
    for entry in taken.images.entries:
        assert again.images.read(entry.path) == taken.images.read(entry.path)
    assert again.processes == taken.processes
    assert second.checkpoint.stored_bytes < first.checkpoint.stored_bytes
    store.close()


def test_the_same_archive_again_is_the_same_checkpoint(tmp_path: Path, store: CheckpointManager) -> None:
    path = _archive(tmp_path / "first.tar")
    first = import_archive(store, path)
    again = import_archive(store, shutil.copy(path, tmp_path / "copy.tar"))
    assert (first.is_new, again.is_new) == (True, False)
    assert again.checkpoint.id == first.checkpoint.id
    assert import_archive(store, path, key="other").is_new
    unpacked = tmp_path / "unpacked"
    with tarfile.open(path) as archive:
        archive.extractall(unpacked, filter="data")
    assert import_archive(store, unpacked, key="third").is_new
    assert not import_archive(store, unpacked, key="third").is_new
    assert len(store.list("container:counter")) == 1
    store.close()


def test_what_came_from_podman_goes_back_to_podman_as_it_was(tmp_path: Path, store: CheckpointManager) -> None:
    path = _archive(tmp_path / "first.tar")
    done = import_archive(store, path)
    export(*snapshot.load(store, done.checkpoint.id), tmp_path / "out.tar", format="podman", compression="none")
    store.close()
    with tarfile.open(path) as before, tarfile.open(tmp_path / "out.tar") as after:  # Python's, as a second opinion
        theirs = {member.name: before.extractfile(member) for member in before.getmembers() if member.isfile()}
        ours = {member.name: after.extractfile(member) for member in after.getmembers() if member.isfile()}
        assert set(ours) == set(theirs)
        for name in theirs:
            old, new = theirs[name], ours[name]
            assert old is not None
            assert new is not None
            if (name.endswith(".dump") and name != "stats-dump") or name == "deleted.files":
                assert json.loads(new.read()) == json.loads(old.read())
            elif name != "rootfs-diff.tar":
                assert new.read() == old.read(), name


def test_an_opaque_directory_is_not_silently_lost(tmp_path: Path, store: CheckpointManager) -> None:
    files = archive_files(None)
    files["rootfs-diff.tar"] = gzip.compress(tar_of([(Member(b"srv/.wh..wh..opq"), b""), (Member(b"srv/new"), b"")]))
    (tmp_path / "x.tar").write_bytes(_tar(files))
    done = import_archive(store, tmp_path / "x.tar")
    kept = snapshot.load(store, done.checkpoint.id)
    with pytest.raises(Validation, match="/srv replaces"):
        export(*kept, tmp_path / "out.tar", format="podman")
    assert not (tmp_path / "out.tar").exists()
    export(*kept, tmp_path / "out.tar", format="containerd")
    again = import_archive(store, tmp_path / "out.tar", key="again")
    assert _tree(store, again.checkpoint.id)["srv"][-2] == {b"trusted.overlay.opaque": b"y"}
    store.close()


def test_the_upper_directory_is_one_that_overlayfs_takes(tmp_path: Path, store: CheckpointManager) -> None:
    done = import_archive(store, _archive(tmp_path / "x.tar"))
    rootfs = snapshot.load(store, done.checkpoint.id)[1].rootfs
    assert rootfs is not None
    rootfs.write_to(tmp_path / "upper", exact=True)
    store.close()
    gone = os.lstat(tmp_path / "upper/etc/gone")
    assert stat.S_ISCHR(gone.st_mode)
    assert gone.st_rdev == 0
    assert os.stat(tmp_path / "upper/data/log").st_nlink == 2
    assert os.getxattr(tmp_path / "upper/data/log", "user.a") == b"b"


def test_an_export_is_whole_or_not_there(tmp_path: Path, store: CheckpointManager) -> None:
    done = import_archive(store, _archive(tmp_path / "x.tar"))
    kept = snapshot.load(store, done.checkpoint.id)
    (tmp_path / "out").write_text("mine")
    with pytest.raises(Conflict):
        export(*kept, tmp_path / "out", format="cri")
    assert (tmp_path / "out").read_text() == "mine"
    with pytest.raises(Validation, match="format"):
        export(*kept, tmp_path / "other", format="zip")
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store", "x.tar"]


def test_an_image_has_the_annotations_that_engines_look_for(tmp_path: Path, store: CheckpointManager) -> None:
    done = import_archive(store, _archive(tmp_path / "x.tar", "cri"))
    export(*snapshot.load(store, done.checkpoint.id), tmp_path / "image.tar", format="oci")
    store.close()
    with tarfile.open(tmp_path / "image.tar") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar.getmembers() if member.isfile()}  # type: ignore[union-attr]
    for name, data in files.items():
        if name.startswith("blobs/sha256/"):
            assert hashlib.sha256(data).hexdigest() == name.rpartition("/")[2]
    index = json.loads(files["index.json"])
    manifest = json.loads(files["blobs/sha256/" + index["manifests"][0]["digest"].partition(":")[2]])
    annotations = manifest["annotations"]
    assert annotations["io.kubernetes.cri-o.annotations.checkpoint.name"] == "counter"
    assert annotations["io.podman.annotations.checkpoint.name"] == "counter"
    assert annotations["org.criu.checkpoint.container.name"] == "counter"
    assert annotations["org.criu.checkpoint.engine.name"] == "cri-o"
    config = json.loads(files["blobs/sha256/" + manifest["config"]["digest"].partition(":")[2]])
    assert config["rootfs"]["diff_ids"] == [manifest["layers"][0]["digest"]]


def test_the_index_that_containerd_makes(tmp_path: Path, store: CheckpointManager) -> None:
    files = archive_files(None)
    images = {name.partition("/")[2]: data for name, data in files.items() if name.startswith("checkpoint/")}
    layout = tmp_path / "layout"
    (layout / "blobs/sha256").mkdir(parents=True)

    def blob(data: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (layout / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    spec = encode([(1, "types.containerd.io/opencontainers/runtime-spec/1/Spec"), (2, files["spec.dump"])])
    index = {
        "schemaVersion": 2,
        "manifests": [
            blob(_tar(images), oci.CRIU_TYPE),
            blob(spec, oci.CONTAINERD_CONFIG_TYPE),
            {"mediaType": oci.MANIFEST_TYPE, "digest": "sha256:" + "0" * 64, "size": 1},  # the image, which is not here
            blob(gzip.compress(files["rootfs-diff.tar"]), "application/vnd.oci.image.layer.v1.tar+gzip"),
        ],
        "annotations": {
            "org.opencontainers.image.ref.name": "docker.io/library/counter:1",
            oci.CONTAINERD_RUNTIME: "io.containerd.runc.v2",
        },
    }
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    top = {"schemaVersion": 2, "manifests": [blob(json.dumps(index).encode(), oci.INDEX_TYPE)]}
    (layout / "index.json").write_text(json.dumps(top))
    done = import_archive(store, layout)
    assert done.checkpoint.job == "container:counter"
    assert _tree(store, done.checkpoint.id)["data/log"][6] == b"x" * 42
    shown = inspect_archive(layout)
    assert (shown.config.image_name, shown.config.runtime) == ("docker.io/library/counter:1", "io.containerd.runc.v2")
    store.close()


# Looking


def test_a_file_and_a_checkpoint_are_shown_alike(tmp_path: Path, store: CheckpointManager) -> None:
    path = _archive(tmp_path / "x.tar")
    done = import_archive(store, path)
    there, here = inspect_archive(path), inspect_stored(store, done.checkpoint.id)
    assert here.processes == there.processes
    assert (here.images_bytes, here.pages_bytes) == (there.images_bytes, there.pages_bytes)
    assert here.statistics == there.statistics
    assert here.config == there.config
    assert here.commands == there.commands == {1: ("init", "--flag"), 7: ("worker", "--flag")}
    assert ("etc/gone", "deleted") in here.changes
    assert ("etc/gone", "deleted") in there.changes
    assert set(here.environment.values()) == {"(hidden)"}
    assert inspect_stored(store, done.checkpoint.id, reveal=True).environment["TOKEN"] == "secret"
    store.close()


def _run(command: object, *words: str, capture: pytest.CaptureFixture[str]) -> str:
    command.main([*words], standalone_mode=False)  # type: ignore[attr-defined]
    return capture.readouterr().out


def test_the_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, store = str(_archive(tmp_path / "x.tar")), str(tmp_path / "store")
    done = json.loads(_run(import_command, path, "--store", store, "--json", capture=capfd))
    assert done["job"] == "container:counter"
    assert done["left_out"] == []
    target = str(tmp_path / "out.tar")
    words = ("counter", target, "--format", "cri", "--store", store)
    assert "wrote" in _run(export_command, *words, capture=capfd)
    for source in (target, "counter", done["id"]):
        text = _run(inspect_command, source, "--store", store, capture=capfd)
        assert "worker --flag" in text
        assert "deleted  /etc/gone" in text
        assert "secret" not in text
        tree = _run(inspect_command, source, "--store", store, "--tree", "--env", capture=capfd)
        assert "inet TCP listening 10.0.0.1:8080" in tree
        assert "TOKEN" in tree
        assert "secret" not in tree
        shown = json.loads(_run(inspect_command, source, "--store", store, "--json", capture=capfd))
        assert [one["name"] for one in shown["processes"]] == ["init", "worker"]
        assert shown["processes"][0]["sockets"][0]["name"] == "10.0.0.1:8080"
        assert "environment" not in shown
    assert "secret" in _run(inspect_command, target, "--reveal", capture=capfd)


def test_a_key_wins_over_a_file_of_the_same_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is no path: a directory called like a workload is no archive. What was taken is said."""
    store = str(tmp_path / "store")
    done = json.loads(
        _run(import_command, str(_archive(tmp_path / "x.tar")), "--store", store, "--json", capture=capfd)
    )
    (tmp_path / "here/counter").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    inspect_command.main(["counter", "--store", store], standalone_mode=False)
    shown = capfd.readouterr()
    assert shown.out.split()[:2] == ["checkpoint", done["id"]]
    assert "./counter" in shown.err
    (tmp_path / "here/counter").rmdir()
    for name in ("counter", "counter.tar", "my dump"):
        _archive(tmp_path / "here" / name)
    for source in ("./counter", "counter.tar", "my dump"):
        assert _run(inspect_command, source, "--store", store, capture=capfd).startswith("archive ")
    assert _run(inspect_command, "counter", "--store", str(tmp_path / "none"), capture=capfd).startswith("archive ")


def test_parts_of_stored_files_are_read_without_the_rest(tmp_path: Path, store: CheckpointManager) -> None:
    (tmp_path / "data").mkdir()
    plain = os.urandom(3 << 20)
    (tmp_path / "data/plain").write_bytes(plain)
    with open(tmp_path / "data/sparse", "wb") as file:
        file.seek(1 << 20)
        file.write(b"x" * 8192)
        file.truncate(4 << 20)
    sparse = (tmp_path / "data/sparse").read_bytes()
    tree = store.load(store.save("job", "s", {"t": kedge.Tree(tmp_path / "data")}))["t"]  # type: ignore[index]
    for name, whole in (("plain", plain), ("sparse", sparse)):
        for offset, size in ((0, 10), (0, 5 << 20), ((1 << 20) - 5, 20), ((1 << 20) + 8190, 9), (len(whole) - 3, 99)):
            assert tree.read_part(name, offset, size) == whole[offset : offset + size]
    assert tree.read_part("plain", 9 << 20, 5) == b""
    store.close()


def test_a_writer_of_bytes_may_be_slow(tmp_path: Path) -> None:
    """A stream that gives a byte at a time is read like any other."""
    from kedge.containers.archive.tar import TarReader

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(1)

    reader = TarReader(Slow(tar_of([(Member(b"x", size=3), b"abc")])), name="slow")
    assert [(member.name, b"".join(reader.pieces())) for member in reader] == [(b"x", b"abc")]


def test_the_document_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = Path(kedge.__file__).parents[2] / "docs" / "container-archives.md"
    blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    write_dump(tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, str(document), "exec"), {})


def test_a_container_has_its_key_and_an_encrypted_store_another(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = str(_archive(tmp_path / "x.tar"))
    words = ("--store", str(tmp_path / "store"), "--key", "mine", "--json")
    assert json.loads(_run(import_command, path, *words, capture=capfd))["job"] == "container:mine"
