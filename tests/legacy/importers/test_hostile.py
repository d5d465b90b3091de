"""Old files made to do harm: nothing is executed, nothing outside is read or written, memory stays bounded."""

from __future__ import annotations

import builtins
import gzip
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.legacy.importers import Options, Report, Verdict, bring
from kedge.legacy.importers.common import Unreadable, name_of
from kedge.legacy.importers.old_pickles import Pickles
from kedge.model import parse_name

from .writers import artemis, geo, jobs


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = tmp_path / "old"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def reader() -> Iterator[Pickles]:
    with Pickles() as opened:
        yield opened


def put(folder: Path, name: str, document: Any) -> None:
    (folder / name).write_text(document if isinstance(document, str) else json.dumps(document))


def text_of(report: Report) -> str:
    return "\n".join(f"{f.verdict} {f.source}: {f.reason}" for f in report.findings)


# --- pickles ---


class Gadget:
    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.reduced = (call, args)

    def __reduce__(self) -> Any:
        return self.reduced


def gadgets(mark: str) -> dict[str, Any]:
    import importlib
    import operator
    import shutil

    return {
        "posix.system": Gadget(os.system, f"touch {mark}"),
        "subprocess.Popen": Gadget(subprocess.Popen, ["touch", mark]),
        "builtins.eval": Gadget(eval, f"open({mark!r}, 'w')"),
        "builtins.exec": Gadget(exec, f"open({mark!r}, 'w')"),
        "io.open": b"cio\nopen\n(V" + mark.encode() + b"\nVw\ntR.",
        "builtins.getattr": b"cbuiltins\ngetattr\n(cos\nsystem\nVx\ntR.",
        "builtins.__import__": Gadget(builtins.__import__, "os"),
        "builtins.compile": Gadget(compile, "1", "x", "eval"),
        "builtins.type": Gadget(type, "X", (), {}),
        "builtins.globals": Gadget(globals),
        "importlib.import_module": Gadget(importlib.import_module, "os"),
        "operator.attrgetter": Gadget(operator.attrgetter, "a"),
        "shutil.rmtree": Gadget(shutil.rmtree, mark),
        "pickle.loads": b"cpickle\nloads\n(C\x01.tR.",
        "functools.partial": b"cfunctools\npartial\n(cos\nsystem\ntR.",
        "types.FunctionType": b"ctypes\nFunctionType\n(tR.",
        "numpy.load": b"cnumpy\nload\n(V/etc/passwd\ntR.",
        "datetime.sys": b"cdatetime\nsys\n.",
        "datetime.datetime.__class__": b"\x80\x04\x8c\x08datetime\x8c\x12datetime.__class__\x93.",
        "builtins.str.__subclasses__": b"\x80\x04\x8c\x08builtins\x8c\x12str.__subclasses__\x93.",
        "collections.abc.os": b"ccollections.abc\nos\n.",
        "socket.socket": b"csocket\nsocket\n(tR.",
        "numpy.core.multiarray.fromfile": b"cnumpy.core.multiarray\nfromfile\n(V/etc/passwd\ntR.",
    }


def test_gadgets_are_named_and_not_called(tmp_path: Path, reader: Pickles) -> None:
    mark = str(tmp_path / "mark")
    for name, gadget in gadgets(mark).items():
        data = gadget if isinstance(gadget, bytes) else pickle.dumps(gadget)
        assert name in reader.read(data).unknown, name
        assert not os.path.exists(mark), name


def test_what_a_gadget_is_given_is_data(tmp_path: Path, reader: Pickles) -> None:
    mark = str(tmp_path / "mark")
    value, unknown = reader.read(pickle.dumps({"x": gadgets(mark)["posix.system"], "y": 1}))
    assert value == {"x": {"$class": "posix.system", "$args": (f"touch {mark}",)}, "y": 1}
    assert unknown == ("posix.system",)
    with Pickles(("posix.system",)) as expecting:
        assert expecting.read(pickle.dumps(gadgets(mark)["posix.system"])).unknown == ()
    assert not os.path.exists(mark)
    with pytest.raises(kedge.Validation):
        Pickles(("not a name",))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x96" + (1 << 40).to_bytes(8, "little"),  # a bytearray of a terabyte
        b"\x80\x04cbuiltins\nbytes\n\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"\x85R.",
        b"\x80\x04P0\n.",  # a persistent reference
        b"\x80\x04c_codecs\nencode\n(Vx\nVrot13\ntR.",
        b"(" * 100_000 + b"t" * 100_000 + b".",
        b"\x80\x04]\x94h\x00a.",  # a list that holds itself
    ],
    ids=["huge", "huge call", "persistent", "codec", "deep", "cycle"],
)
def test_pickles_that_are_too_much(reader: Pickles, data: bytes) -> None:
    with pytest.raises(Unreadable):
        reader.read(data)
    assert reader.read(pickle.dumps([1])).value == [1]


def test_bombs(reader: Pickles) -> None:
    bomb: Any = [1] * 10
    for _ in range(12):
        bomb = [bomb] * 10
    with pytest.raises(Unreadable, match="values"):
        reader.read(pickle.dumps(bomb))
    with pytest.raises(Unreadable, match="unpacked"):
        reader.read(gzip.compress(bytes(16 << 20), 1) * 40)
    assert reader.read(pickle.dumps([1])).value == [1]


def test_a_pickle_that_never_ends_is_given_up() -> None:
    with Pickles(wall_s=30) as reader:
        assert reader.read(pickle.dumps(1)).value == 1
        reader._wall_s = 0.2
        with pytest.raises(Unreadable, match="more than 0\\.2 s"):
            reader.read(pickle.dumps(list(range(3_000_000))))
        reader._wall_s = 30
        assert reader.read(pickle.dumps(1)).value == 1


def test_the_child_can_reach_nothing() -> None:
    code = """
import os, socket, subprocess, sys, tempfile
from kedge.legacy.importers import old_pickle_child
old_pickle_child.confine()
def refused(call):
    try: call()
    except (OSError, MemoryError): return True
    return False
print([refused(c) for c in (
    lambda: socket.socket(), lambda: subprocess.run(["true"]), lambda: os.fork(), lambda: os.mkdir("/tmp/kedge-x"),
    lambda: os.unlink(sys.argv[1]), lambda: os.rename(sys.argv[1], sys.argv[1] + "x"), lambda: bytearray(3 << 30),
    lambda: os.kill(os.getppid(), 0),
)])
"""
    done = subprocess.run([sys.executable, "-c", code, __file__], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str([True] * 8), done.stderr
    assert os.path.exists(__file__)


# --- names and paths ---


NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "..",
    ".",
    "a\0b",
    "-rf",
    "",
    "x" * 5000,
    "ü",
    "a\nb",
    "\ud800",
    "CON",
    "%2e%2e",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_become_names(name: str) -> None:
    made = name_of(name)
    assert parse_name("job", made) == made
    assert name_of(name, prefix="p-").startswith("p-")
    assert len({name_of(n) for n in NAMES}) == len(NAMES)


def test_traversal_in_ids(old: Path, store: kedge.CheckpointManager, tmp_path: Path) -> None:
    before = {str(p) for p in tmp_path.rglob("*") if "store" not in str(p)}
    for n, name in enumerate(NAMES):
        put(old, f"card{n}.json", artemis.card(name, {name or "s": artemis.stage(name, 0)}, checkpoint_id=name))
        put(old, f"job{n}.json", jobs.checkpoint(name, name or "s", {"n": n}, checkpoint_id=f"{name}{n}"))
        put(old, f"exec{n}.json", {**jobs.execution("c", []), "execution_id": name + str(n)})
        geo.stage(old, f"e{n}", "load", n, experiment_id=name)
    report = bring(str(old), store)
    assert not report.of(Verdict.CORRUPTED)
    assert bring(str(old), store).imported == 0
    written = {str(p) for p in tmp_path.rglob("*") if "store" not in str(p)} - before
    assert all(path.startswith(str(old)) for path in written)
    assert store.verify().is_ok
    for job in store.jobs():
        for checkpoint in store.list(job.name):
            store.load(checkpoint.id)


def test_links_are_not_followed(old: Path, store: kedge.CheckpointManager, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    jobs.write(outside, jobs.checkpoint("secret", "s", "x"))
    secret = next(outside.rglob("*.json"))
    (old / "link.json").symlink_to(secret)
    (old / "folder").symlink_to(outside)
    (old / "loop").symlink_to(old)
    geo.core(old, "9f0c_a_1753401600", {"x": 1})
    (old / "9f0c_a_1753401600" / "y.pkl").symlink_to(secret)
    os.mkfifo(old / "pipe.json")
    report = bring(str(old), store)
    assert [job.name for job in store.jobs()] == ["9f0c"]
    assert text_of(report).count("links are never followed") == 4


def test_a_registry_that_points_outside(old: Path, store: kedge.CheckpointManager, tmp_path: Path) -> None:
    geo.core(tmp_path, "secret_1", {"x": "secret"}, register=False)
    about = geo.core(old, "9f0c_a_1753401600", {"x": 1}, register=False)
    outside = {**about, "checkpoint_id": "../secret_1", "data_files": ["../secret_1/x.pkl.gz"]}
    bent = {**about, "data_files": ["9f0c_a_1753401600/x.pkl.gz", "../secret_1/x.pkl.gz", "/etc/passwd"]}
    put(old, "registry.json", {"../secret_1": outside, "9f0c_a_1753401600": bent, "/etc": outside})
    report = bring(str(old), store)
    assert text_of(report).count("its ID is a path") == 2
    assert "outside its folder" in text_of(report)
    assert [store.load(c.id) for job in store.jobs() for c in store.list(job.name)] == [{"x": 1}]


def test_duplicate_ids_and_cyclic_parents(old: Path, store: kedge.CheckpointManager) -> None:
    for n in range(5):
        put(old, f"{n}.json", jobs.checkpoint("job", "s", n, 0, parent_id="s_1763461834_00000000"))
    report = bring(str(old), store)
    assert report.imported == 5
    assert sorted(store.load(c.id) for c in store.list("job")) == list(range(5))  # type: ignore[type-var]
    assert bring(str(old), store).imported == 0


# --- JSON ---


def memory_of(folder: Path, *words: str) -> tuple[str, int]:
    """What an import of `folder` prints, and how much memory it took, in bytes."""
    code = (
        "import sys, kedge\nfrom kedge.legacy.importers import bring\n"
        "with kedge.open('memory:') as store:\n"
        "    report = bring(sys.argv[1], store)\n"
        "print(report.imported, [f.reason for f in report.findings])\n"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(int(peak.split()[1]) * 1024)\n"  # ru_maxrss would count what the process that started this one had
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    said, used = done.stdout.strip().rsplit("\n", 1)
    return said, int(used)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 200_000 + "]" * 200_000, "nested too deep"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deep"),
        ("[" + "[]," * 5_000_000 + "1]", "JSON values"),
        ("[" + "1" * 5_000 + "]", "not readable as JSON"),
    ],
    ids=["deep list", "deep object", "many", "number"],
)
def test_json_bombs(old: Path, text: str, expected: str) -> None:
    put(old, "bomb.json", text)
    said, used = memory_of(old)
    assert said.startswith("0 ")
    assert expected in said
    assert used < 400 << 20


def test_a_hundred_megabytes_of_json(old: Path) -> None:
    document = jobs.checkpoint("job", "s", {"text": "x" * (100 << 20)})
    put(old, "large.json", document)
    said, used = memory_of(old)
    assert said == "1 []"
    assert used < 1200 << 20


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe", b"nul", b'{"job_id": "\xff"}', b"{}", b"[]", b"null", b'{"a": 1e999}', b"\x80\x04", b"\x1f\x8b"],
)
def test_odd_files(old: Path, store: kedge.CheckpointManager, data: bytes) -> None:
    (old / "odd.json").write_bytes(data)
    report = bring(str(old), store)
    assert report.imported == 0
    assert len(report.findings) == 1


def test_fields_of_the_wrong_type(old: Path, store: kedge.CheckpointManager) -> None:
    wrong: list[Any] = [None, -1, "x", [1], {"a": None}]
    n = 0
    for make in (
        lambda: artemis.card("c", {"a": artemis.stage("a", 0)}),
        lambda: artemis.results("c", {"a": "completed"}),
        lambda: artemis.state("c", ["a"]),
        lambda: artemis.index(0, {"A": {}}),
        lambda: jobs.checkpoint("j", "s", {}),
        lambda: jobs.execution("c", [jobs.step("a")]),
        lambda: jobs.whole_job("j"),
    ):
        for field in make():
            for value in wrong:
                put(old, f"{n}.json", {**make(), field: value})
                n += 1
    bring(str(old), store)  # whatever it makes of them, it does not stop
    assert store.verify().is_ok


def test_a_store_is_no_source(store: kedge.CheckpointManager, tmp_path: Path) -> None:
    with pytest.raises(kedge.Validation, match="is a Kedge store"):
        bring(str(tmp_path / "store"), store)
    with pytest.raises(kedge.NotFound):
        bring(str(tmp_path / "nowhere"), store)
    with pytest.raises(kedge.Validation):
        bring(str(tmp_path), store, Options(form="floppy"))
