"""Archives of containers from strangers: nothing outside is touched, nothing grows without bound, nothing is obeyed."""

import gzip
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

import kedge
from kedge.containers.archive import oci
from kedge.containers.archive.extraction import Extraction
from kedge.containers.archive.importer import import_archive
from kedge.containers.archive.layout import safe_spec
from kedge.containers.archive.scratch import PREFIX
from kedge.containers.archive.tar import (
    CHARACTER,
    DIRECTORY,
    FIFO,
    FILE,
    HARD_LINK,
    SYMLINK,
    Limits,
    Member,
    TarReader,
)
from kedge.containers.archive.tar_writer import TarWriter
from kedge.containers.archive.unpack import unpack
from kedge.errors import CheckpointError, Corrupted, NoSpace, NotFound, Validation
from tests.torture.disks import tmpfs
from tests.unit.containers.archive_writer import archive_files, tar_of

pytestmark = pytest.mark.requires("root")

Members = list[tuple[Member, bytes]]


def _layer(
    directory: Path, members: list[tuple[Member, bytes]], deleted: tuple[bytes, ...] = ()
) -> list[tuple[str, str]]:
    directory.mkdir(exist_ok=True)
    with Extraction(directory, name="layer") as extraction:
        extraction.layer(TarReader(io.BytesIO(tar_of(members)), name="layer"), deleted)
        return extraction.left_out


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("untouched")
    return tmp_path / "outside"


def _is_untouched(outside: Path) -> bool:
    return os.listdir(outside) == ["secret"] and (outside / "secret").read_text() == "untouched"


def test_a_path_through_a_link_is_refused(tmp_path: Path, outside: Path) -> None:
    for link in (str(outside).encode(), b"../outside", b"."):
        with pytest.raises(Validation, match="does not fit"):
            _layer(tmp_path / link.hex(), [(Member(b"way", SYMLINK, link=link), b""), (Member(b"way/x", size=1), b"x")])
    assert _is_untouched(outside)


def test_a_link_under_the_name_of_a_file_is_replaced_not_followed(tmp_path: Path, outside: Path) -> None:
    target = os.fsencode(outside / "secret")
    _layer(tmp_path / "up", [(Member(b"x", SYMLINK, link=target), b""), (Member(b"x", size=3), b"new")])
    assert (tmp_path / "up/x").read_text() == "new"
    assert not (tmp_path / "up/x").is_symlink()
    assert _is_untouched(outside)


def test_hard_links_reach_only_files_of_the_layer(tmp_path: Path, outside: Path) -> None:
    os.symlink(outside, tmp_path / "up-link")
    for link in (os.fsencode(outside / "secret"), b"../outside/secret", b"way/secret", b"absent"):
        members = [(Member(b"way", SYMLINK, link=os.fsencode(outside)), b""), (Member(b"x", HARD_LINK, link=link), b"")]
        with pytest.raises(CheckpointError):
            _layer(tmp_path / link.hex()[-40:], members)
    with pytest.raises(Validation):
        _layer(
            tmp_path / "l",
            [(Member(b"s", SYMLINK, link=b"/etc/passwd"), b""), (Member(b"h", HARD_LINK, link=b"s"), b"")],
        )
    assert (outside / "secret").stat().st_nlink == 1


def test_devices_and_attributes_that_overlayfs_obeys_are_left_out(tmp_path: Path) -> None:
    attributes = {b"trusted.overlay.redirect": b"/etc", b"user.mine": b"kept"}
    left_out = _layer(
        tmp_path / "up",
        [(Member(b"sda", CHARACTER, device=(8, 0)), b""), (Member(b"d", DIRECTORY, attributes=attributes), b"")],
    )
    assert left_out == [("sda", "a device"), ("d/", "attribute trusted.overlay.redirect")]
    assert os.listdir(tmp_path / "up") == ["d"]
    assert os.listxattr(tmp_path / "up/d") == ["user.mine"]


def test_a_layer_keeps_what_it_should(tmp_path: Path) -> None:
    upper = tmp_path / "up"
    capability = bytes.fromhex("0100000200040000000000000000000000000000")
    attributes = {b"security.capability": capability}
    _layer(
        upper,
        [
            (Member(b"bin", DIRECTORY, mode=0o751, uid=5, gid=6, mtime_ns=123), b""),
            (Member(b"bin/ping", size=2, mode=0o4755, uid=7, mtime_ns=5_000_000_001, attributes=attributes), b"hi"),
            (Member(b"bin/same", HARD_LINK, link=b"bin/ping"), b""),
            (Member(b"pipe", FIFO, mode=0o620), b""),
            (Member(b"holes", size=1 << 30, ranges=[(1 << 20, 4)]), b"data"),
            (Member(b"etc/.wh.gone"), b""),
            (Member(b"srv/.wh..wh..opq"), b""),
        ],
        (b"/var/old", b"bin/ping"),
    )  # fmt: skip
    ping = os.stat(upper / "bin/ping")
    assert (stat.S_IMODE(ping.st_mode), ping.st_uid, ping.st_mtime_ns, ping.st_nlink) == (0o4755, 7, 5_000_000_001, 2)
    assert os.getxattr(upper / "bin/ping", "security.capability") == capability
    directory = os.stat(upper / "bin")
    assert (stat.S_IMODE(directory.st_mode), directory.st_uid, directory.st_gid, directory.st_mtime_ns) == (
        0o751,
        5,
        6,
        123,
    )
    holes = os.stat(upper / "holes")
    assert holes.st_size == 1 << 30
    assert holes.st_blocks * 512 < 1 << 20
    for hidden in ("etc/gone", "var/old"):
        status = os.lstat(upper / hidden)
        assert stat.S_ISCHR(status.st_mode)
        assert status.st_rdev == 0
    assert os.getxattr(upper / "srv", "trusted.overlay.opaque") == b"y"


# Whole archives.


@pytest.fixture
def files() -> dict[str, bytes]:
    return archive_files()


def _write(path: Path, files: dict[str, bytes], more: Members | None = None) -> Path:
    path.write_bytes(
        tar_of([(Member(name.encode(), size=len(data)), data) for name, data in files.items()] + (more or []))
    )
    return path


@pytest.mark.parametrize(
    "member",
    [
        Member(b"container.log", SYMLINK, link=b"/etc/passwd"),
        Member(b"checkpoint/x.img", HARD_LINK, link=b"config.dump"),
        Member(b"checkpoint/dev", CHARACTER, device=(1, 3)),
        Member(b"pipe", FIFO),
        Member(b"../../escape", FILE),
        Member(b"config.dump", FILE),  # a second time
    ],
)
def test_members_that_no_archive_has(tmp_path: Path, files: dict[str, bytes], member: Member) -> None:
    path = _write(tmp_path / "x.tar", files, [(member, b"")])
    with kedge.open(tmp_path / "store") as store:
        with pytest.raises(CheckpointError):
            import_archive(store, path, work=tmp_path)
        assert store.jobs() == []
    assert sorted(os.listdir(tmp_path)) == ["store", "x.tar"]  # what was unpacked is gone


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_bombs(tmp_path: Path, files: dict[str, bytes], compress: object) -> None:
    head = tar_of([(Member(b"bomb", size=1 << 28), b"")], sizes=False)[:512]
    path = tmp_path / "bomb"
    path.write_bytes(compress(head + bytes(64 << 20)))  # type: ignore[operator]
    assert path.stat().st_size < 1 << 20
    (tmp_path / "target").mkdir()
    with pytest.raises(Validation, match="bytes"):
        unpack(path, tmp_path / "target", Limits(total_bytes=16 << 20))
    assert sum(file.stat().st_size for file in (tmp_path / "target").rglob("*")) < 17 << 20


def test_a_layer_that_is_a_bomb_inside_an_archive(tmp_path: Path, files: dict[str, bytes]) -> None:
    files["rootfs-diff.tar"] = gzip.compress(tar_of([(Member(b"x", size=32 << 20), bytes(32 << 20))]))
    path = _write(tmp_path / "x.tar", files)
    with kedge.open(tmp_path / "store") as store, pytest.raises(Validation, match="bytes"):
        import_archive(store, path, limits=Limits(total_bytes=8 << 20))


@pytest.mark.parametrize("name", ["config.dump", "spec.dump", "checkpoint/inventory.img", "checkpoint/pstree.img"])
@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"\xff\xfe", b"[]"])
def test_damaged_documents(tmp_path: Path, files: dict[str, bytes], name: str, data: bytes) -> None:
    files[name] = data
    path = _write(tmp_path / "x.tar", files)
    with kedge.open(tmp_path / "store") as store, pytest.raises(CheckpointError):
        import_archive(store, path)
        assert store.jobs() == []


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "xz").write_bytes(b"\xfd7zXZ\0" + bytes(100))
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    expected: dict[str, type[CheckpointError]] = {
        "x": Corrupted, "empty": Validation, "xz": Validation, "directory": Validation, "fifo": Validation,
        "absent": NotFound,
    }  # fmt: skip
    for number, (name, kind) in enumerate(expected.items()):
        target = tmp_path / f"target-{number}"
        target.mkdir()
        with pytest.raises(kind):
            unpack(tmp_path / name, target)


def test_nothing_of_the_configuration_acts_on_the_host() -> None:
    spec = {
        "ociVersion": "1.1.0",
        "process": {"args": ["sh"], "env": ["A=1"], "apparmorProfile": "unconfined", "selinuxLabel": "x"},
        "root": {"path": "/", "readonly": True},
        "hooks": {"prestart": [{"path": "/bin/sh"}]},
        "annotations": {"cdi.k8s.io/x": "vendor.com/device=all", "kedge.dev/restore": "latest"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/host", "type": "bind", "source": "/", "options": ["rbind"]},
            {"destination": "/sneaky", "type": "tmpfs", "source": "/", "options": ["bind"]},
        ],
        "linux": {
            "namespaces": [{"type": "network", "path": "/proc/1/ns/net"}, {"type": "pid"}],
            "devices": [{"path": "/dev/sda"}],
            "cgroupsPath": "/escape",
            "resources": {"devices": [{"allow": True}]},
            "rootfsPropagation": "shared",
        },
    }
    assert safe_spec(spec) == {
        "ociVersion": "1.1.0",
        "process": {"args": ["sh"], "env": ["A=1"]},
        "root": {"path": "rootfs", "readonly": True},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "linux": {"namespaces": [{"type": "network"}, {"type": "pid"}]},
    }
    assert safe_spec({"process": 3, "linux": [], "mounts": "x", "root": None})["mounts"] == []


def test_the_kept_spec_is_the_safe_one(tmp_path: Path, files: dict[str, bytes]) -> None:
    spec = json.loads(files["spec.dump"])
    spec["hooks"] = {"prestart": [{"path": "/bin/evil"}]}
    files["spec.dump"] = json.dumps(spec).encode()
    path = _write(tmp_path / "x.tar", files)
    with kedge.open(tmp_path / "store") as store:
        done = import_archive(store, path)
        kept = store.load(done.checkpoint.id)["spec"]  # type: ignore[index]
    assert "hooks" not in kept
    assert "annotations" not in kept


def test_names_in_an_archive_never_become_names_of_ours_unchecked(tmp_path: Path, files: dict[str, bytes]) -> None:
    config = json.loads(files["config.dump"])
    config["name"] = "../../etc/x y\n"
    files["config.dump"] = json.dumps(config).encode()
    path = _write(tmp_path / "x.tar", files)
    with kedge.open(tmp_path / "store") as store:
        assert import_archive(store, path).checkpoint.job == "container:etc-x-y"
    config["name"] = config["id"] = "///"
    files["config.dump"] = json.dumps(config).encode()
    with kedge.open(tmp_path / "store") as store, pytest.raises(Validation, match="called"):
        import_archive(store, _write(path, files))


def test_an_image_whose_blob_was_changed(tmp_path: Path, files: dict[str, bytes]) -> None:
    from kedge.containers import snapshot
    from kedge.containers.archive.export import export

    with kedge.open(tmp_path / "store") as store:
        done = import_archive(store, _write(tmp_path / "x.tar", files))
        export(*snapshot.load(store, done.checkpoint.id), tmp_path / "image.tar", format="oci")
        data = bytearray((tmp_path / "image.tar").read_bytes())
        position = data.index(b"/data/log")
        data[position + 1] ^= 1
        (tmp_path / "image.tar").write_bytes(data)
        with pytest.raises(Corrupted, match="blob"):
            import_archive(store, tmp_path / "image.tar")


@pytest.mark.parametrize("way", ["a blob", "the folder of blobs", "the index"])
def test_links_in_a_layout_are_not_followed(tmp_path: Path, outside: Path, files: dict[str, bytes], way: str) -> None:
    """Whoever may write a directory that root imports must not read, through a link, what only root can."""
    layout, target = tmp_path / "layout", tmp_path / "empty"
    target.mkdir()
    secret = _write(outside / "secret.tar", files)
    digest = hashlib.sha256(secret.read_bytes()).hexdigest()
    blobs = outside / "blobs" if way == "the folder of blobs" else layout / "blobs/sha256"
    blobs.mkdir(parents=True)
    manifest = json.dumps({"layers": [{"digest": f"sha256:{digest}"}]}).encode()
    (blobs / hashlib.sha256(manifest).hexdigest()).write_bytes(manifest)
    if way == "a blob":
        (blobs / digest).symlink_to(secret)
    else:
        (blobs / digest).write_bytes(secret.read_bytes())
    if way == "the folder of blobs":
        (layout / "blobs").mkdir(parents=True)
        (layout / "blobs/sha256").symlink_to(blobs)
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    named = {"mediaType": oci.MANIFEST_TYPE, "digest": f"sha256:{hashlib.sha256(manifest).hexdigest()}"}
    index = outside / "index.json" if way == "the index" else layout / "index.json"
    index.write_text(json.dumps({"manifests": [named]}))
    if way == "the index":
        (layout / "index.json").symlink_to(index)
    with pytest.raises(kedge.Validation, match="is a link"):
        unpack(layout, target)


def test_tar_writer_notices_a_file_that_is_not_what_it_said() -> None:
    with pytest.raises(ValueError, match="instead of"):
        TarWriter(io.BytesIO()).add(Member(b"x", size=4), [b"abc"])


# Disks that fill up.


@pytest.mark.requires("tmpfs")
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, files: dict[str, bytes]) -> None:
    from kedge.containers import snapshot
    from kedge.containers.archive.export import export

    files["checkpoint/pages-1.img"] = os.urandom(4096) + files["checkpoint/pages-1.img"][4096:]
    path = _write(tmp_path / "x.tar", files)
    with tmpfs(tmp_path / "small", "size=48k") as small, kedge.open(tmp_path / "store") as store:
        with pytest.raises(NoSpace):
            import_archive(store, path, work=small)
        assert os.listdir(small) == []
        assert store.jobs() == []
        done = import_archive(store, path)
        for format in ("podman", "oci"):
            with pytest.raises(NoSpace):
                export(*snapshot.load(store, done.checkpoint.id), Path(small, "out"), format=format, compression="none")
            assert os.listdir(small) == []


def test_what_a_killed_import_left_is_removed_and_no_other(tmp_path: Path, files: dict[str, bytes]) -> None:
    program = (
        "import sys, time; from kedge.containers.archive.scratch import private_directory\n"
        "with private_directory(sys.argv[1]) as home:\n"
        "    (home / 'x').mkdir(); print('in', flush=True); time.sleep(100)"  # sleep: until it is killed
    )
    work = tmp_path / "work"
    work.mkdir()
    (work / f"{PREFIX}link").symlink_to(tmp_path)
    dead, alive = (
        subprocess.Popen([sys.executable, "-c", program, str(work)], stdout=subprocess.PIPE) for _ in range(2)
    )
    for child in (dead, alive):
        assert child.stdout is not None
        assert child.stdout.readline() == b"in\n"
        child.stdout.close()
    assert len(os.listdir(work)) == 3
    dead.kill()
    dead.wait()
    with kedge.open(tmp_path / "store") as store:
        import_archive(store, _write(tmp_path / "x.tar", files), work=work)
    assert len(os.listdir(work)) == 2  # the link, and the one in use
    alive.kill()
    alive.wait()
    assert (tmp_path / "x.tar").exists()


def test_a_mode_that_is_no_number(tmp_path: Path) -> None:
    data = bytearray(tar_of([(Member(b"x"), b"")]))
    data[100:107] = b"zzzzzzz"
    data[148:156] = b"%06o\0 " % sum(data[:148] + b" " * 8 + data[156:512])
    (tmp_path / "up").mkdir()
    with Extraction(tmp_path / "up", name="x") as extraction, pytest.raises(Corrupted, match="mode"):
        extraction.layer(TarReader(io.BytesIO(bytes(data)), name="x"))


# Each safeguard, taken out, is noticed.

_WITHOUT: list[tuple[str, object, Callable[..., None]]] = [
    ("archive.extraction._OPEN_DIRECTORY", os.O_RDONLY | os.O_DIRECTORY, test_a_path_through_a_link_is_refused),
    ("archive.extraction._SAFE_ATTRIBUTES", b"", test_devices_and_attributes_that_overlayfs_obeys_are_left_out),
    ("archive.extraction.DEVICES", (), test_devices_and_attributes_that_overlayfs_obeys_are_left_out),
    ("archive.layout._is_plain", lambda mount: True, test_nothing_of_the_configuration_acts_on_the_host),
    ("archive.importer.formats.safe_spec", dict, test_the_kept_spec_is_the_safe_one),
]


@pytest.mark.mutant
@pytest.mark.parametrize(("name", "value", "test"), _WITHOUT, ids=[name for name, _, _ in _WITHOUT])
def test_safeguards_are_noticed(
    tmp_path: Path, outside: Path, name: str, value: object, test: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"kedge.containers.{name}", value)
    known = {"tmp_path": tmp_path, "outside": outside, "files": archive_files()}
    wanted = test.__code__.co_varnames[: test.__code__.co_argcount]
    with pytest.raises((AssertionError, pytest.fail.Exception, CheckpointError, OSError)):
        test(**{argument: known[argument] for argument in wanted})
