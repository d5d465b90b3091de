"""CRIU's images read back: those a real CRIU writes, those made by hand, and those that nobody should believe."""

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kedge
from kedge.containers.criu import images
from kedge.containers.criu.image_files import StoredImages
from kedge.containers.criu.images import (  # fmt: skip
    check_inventory,
    command_line,
    environment,
    pagemap,
    processes,
    statistics,
)
from kedge.containers.protobuf import Message, NotAMessage, encode
from kedge.errors import CheckpointError, Corrupted, NotFound
from tests.unit.containers.criu_writer import image, write_dump


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    write_dump(tmp_path / "dump")
    return tmp_path / "dump"


def test_what_a_dump_says(dump: Path) -> None:
    check_inventory(dump)
    first, second = processes(dump)
    assert (first.pid, first.parent, first.name, first.state) == (1, 0, "init", "running")
    assert (second.pid, second.parent, second.name) == (7, 1, "worker")
    assert first.memory_bytes == 8192
    assert first.executable == "/usr/bin/app"
    assert [(file.fd, file.kind, file.name, file.detail) for file in first.files] == [
        (0, "file", "/data/log", ""),
        (3, "inet", "10.0.0.1:8080", "TCP listening"),
        (4, "unix", "@name@x", "stream listening"),
        (5, "timerfd", "", ""),
        (6, "pipe", "", ""),
    ]
    assert first.files[0].is_writable
    assert command_line(dump, 7) == ("worker", "--flag")
    assert environment(dump, 1) == {"TOKEN": "secret", "LANG": "C"}


def test_memory_as_windows_of_addresses(dump: Path) -> None:
    found = pagemap(dump)[0]
    assert (found.name, found.pages_file, found.stored_bytes) == ("1", "pages-1.img", 8192)
    here, elsewhere, lazy = found.windows
    assert (here.address, here.size_bytes, here.offset) == (0x1000, 4096, 0)
    assert (elsewhere.offset, lazy.offset) == (None, 4096)


def test_the_flags_of_older_images(tmp_path: Path) -> None:
    rows = [[(1, 3)], [(1, 0x1000), (2, 2)], [(1, 0x9000), (2, 1), (3, 1)]]
    (tmp_path / "pagemap-5.img").write_bytes(image("pagemap", rows)[4:])  # without the common magic number
    here, parent = pagemap(tmp_path)[0].windows
    assert (here.offset, here.size_bytes, parent.offset) == (0, 8192, None)


def test_files_of_an_older_criu(dump: Path) -> None:
    (dump / "files.img").unlink()
    (dump / "reg-files.img").write_bytes(image("reg-files", [[(1, 1), (2, 0), (6, "/old")], [(1, 9), (6, "/bin/old")]]))
    first = processes(dump)[0]
    assert (first.files[0].name, first.executable) == ("/old", "/bin/old")


def test_criu_figures(dump: Path) -> None:
    figures = statistics(dump)
    assert (figures["frozen_us"], figures["pages_written"]) == (250, 2)


def test_the_same_out_of_a_store(dump: Path, tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        identity = store.save("job", "dump", {"images": kedge.Tree(dump)})
        stored = StoredImages(store.load(identity)["images"], identity)  # type: ignore[index]
        assert processes(stored) == processes(dump)
        assert pagemap(stored) == pagemap(dump)
        assert environment(stored, 1) == environment(dump, 1)
        with pytest.raises(NotFound):
            stored.read("absent", 0, 1)


# What nobody should believe.


def test_a_directory_without_a_dump(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no dump"):
        check_inventory(tmp_path)
    with pytest.raises(NotFound):
        processes(tmp_path / "absent")


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [(1, 0), (1, 0)],
        [(1, 0), (2, 3), (3, 2)],  # a cycle
        [(1, 0), (2, 2)],
        [(0, 0)],
        [(n, n - 1) for n in range(1, 5000)],  # deeper than anyone starts processes
    ],
)
def test_trees_that_are_none(dump: Path, rows: list[tuple[int, int]]) -> None:
    (dump / "pstree.img").write_bytes(image("pstree", [[(1, pid), (2, parent)] for pid, parent in rows]))
    with pytest.raises(Corrupted, match=r"pstree\.img"):
        processes(dump)


def test_too_many_threads(dump: Path) -> None:
    threads = [(5, n) for n in range(70_000)]
    (dump / "pstree.img").write_bytes(image("pstree", [[(1, 1), (2, 0), *threads]]))
    with pytest.raises(Corrupted, match="too many"):
        processes(dump)


def test_lengths_are_not_believed(dump: Path) -> None:
    whole = (dump / "mm-1.img").read_bytes()
    (dump / "mm-1.img").write_bytes(whole[:8] + b"\xff\xff\xff\xff" + whole[12:])
    with pytest.raises(Corrupted, match=r"mm-1\.img"):
        processes(dump)
    (dump / "pagemap-1.img").write_bytes(image("pagemap", [[(1, 1)], [(1, 1 << 63), (5, 1 << 60), (4, 4)]]))
    with pytest.raises(Corrupted, match=r"pagemap-1\.img"):
        pagemap(dump)


def test_an_image_larger_than_any_is_not_read_into_memory(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 1 << 20)
    os.truncate(dump / "files.img", 1 << 40)  # sparse
    with pytest.raises(Corrupted, match=r"files\.img"):
        processes(dump)


def test_links_are_not_followed(dump: Path) -> None:
    (dump / "core-1.img").rename(dump / "elsewhere")
    (dump / "core-1.img").symlink_to("elsewhere")
    assert processes(dump)[0].name == ""  # as if it were not there
    (dump / "pstree.img").unlink()
    os.mkfifo(dump / "pstree.img")
    with pytest.raises(NotFound):
        processes(dump)


@given(st.data())
def test_damage_anywhere_is_typed_and_never_more(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_dump(directory)
        victim = data.draw(st.sampled_from(sorted(path for path in directory.iterdir() if "pages-" not in path.name)))
        whole = bytearray(victim.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        victim.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
        for read in (check_inventory, processes, pagemap, statistics, lambda d: environment(d, 1)):
            with contextlib.suppress(CheckpointError):
                read(directory)


_VALUES = st.one_of(st.integers(0, (1 << 64) - 1), st.binary(max_size=30))
_FIELDS = st.lists(st.tuples(st.integers(1, (1 << 29) - 1), _VALUES), max_size=9)


@given(_FIELDS)
def test_messages_come_back(fields: list[tuple[int, int | bytes]]) -> None:
    message = Message(encode(fields))
    last = dict(fields)
    for number, value in last.items():
        assert (message.number(number) if isinstance(value, int) else message.bytes(number)) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_not(data: bytes) -> None:
    try:
        Message(data)
    except NotAMessage:
        pass


def test_numbers_packed_or_not() -> None:
    assert Message(encode([(5, b"\x01\x96\x01"), (5, 3)])).numbers(5) == [1, 150, 3]


# A real one.

_PROGRAM = """
import os, socket, sys, threading, time
os.closerange(3, 256)
name = socket.socket(socket.AF_UNIX); name.bind("\\0kedge-images-" + sys.argv[1]); name.listen(1)
log = open(sys.argv[2], "a"); log.write("a line\\n"); log.flush()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # sleep: until it is killed
data = bytearray(os.urandom(1 << 20))
child = os.fork()
if child: print("ready", flush=True)
time.sleep(600)  # sleep: until it is killed
"""


@pytest.mark.requires("criu")
@pytest.mark.xdist_group("criu")
def test_what_a_real_criu_wrote(tmp_path: Path) -> None:
    target = tmp_path / "dump"
    target.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-ISc", _PROGRAM, str(os.getpid()), str(tmp_path / "log")],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        env={"COLOUR": "green"},
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    child.stdout.close()
    # A dump in the network namespace of its process locks nothing but connections, and there are none.
    dumped = subprocess.run(
        ["criu", "dump", "-t", str(child.pid), "-D", str(target), "-o", "dump.log", "--network-lock",
         "skip"],
        capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    log = (target / "dump.log").read_text()
    child.kill()
    child.wait()
    assert dumped.returncode == 0, log[-2000:]
    first, second = processes(target)
    assert (first.pid, second.parent) == (child.pid, child.pid)
    assert len(first.threads) == 2
    assert first.memory_bytes > 1 << 20
    assert Path(first.executable).name.startswith("python")
    named = {file.name: file for file in first.files}
    assert named[f"@kedge-images-{os.getpid()}"].detail == "stream listening"
    assert named[str(tmp_path / "log")].is_writable
    assert command_line(target, first.pid)[3:] == (str(os.getpid()), str(tmp_path / "log"))
    assert environment(target, first.pid) == {"COLOUR": "green"}
    assert sum(found.stored_bytes for found in pagemap(target)) == sum(
        path.stat().st_size for path in target.glob("pages-*.img")
    )
    assert statistics(target)["pages_written"] > 256
