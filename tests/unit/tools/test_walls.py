"""Each rule of tools/walls sees its breach, and nothing else."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "walls"


@pytest.fixture(scope="module")
def walls() -> ModuleType:
    spec = spec_from_loader("walls", SourceFileLoader("walls", str(TOOL)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package(folder: Path, **sources: str) -> Path:
    for name, text in sources.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


FIFTY_ONE_LINES = "def f():\n" + "    x = 1\n" * 50


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ("def f(store):\n    return store._index\n", (2, "private member _index of another module")),
        ("def f():\n    return a.b()._c.d\n", (2, "private member _c of another module")),
        ("from kedge.store import _open\n", (1, "private name _open imported")),
        (FIFTY_ONE_LINES, (1, "f has 51 lines, at most 50")),
        ("async " + FIFTY_ONE_LINES, (1, "f has 51 lines, at most 50")),
        ("x = 1\n" * 451, (1, "451 lines, at most 450")),
        ("def f(row):\n    return row[13]\n", (2, "row[13]: read columns by name")),
        ("if 'gone' in str(error):\n    x = 1\n", (1, "decided by the text of an error message")),
        ("x = 'gone' not in error.message\n", (1, "decided by the text of an error message")),
        ("x = str(exc) == 'gone'\n", (1, "decided by the text of an error message")),
        ("x = str(e).startswith('gone')\n", (1, "decided by the text of an error message")),
        ("x = 'gone' in str(error).lower()\n", (1, "decided by the text of an error message")),
        ("for each in names:\n    x = 1\n", (1, "a value is called each: say what it is")),
        ("def f(kept):\n    return kept\n", (1, "a value is called kept: say what it is")),
        ("sys.set_int_max_str_digits(0)\n", (1, "the limit on the digits of integers is lifted")),
    ],
)
def test_each_breach_is_seen(walls: ModuleType, source: str, finding: tuple[int, str]) -> None:
    assert list(walls.findings_in("care/gc.py", source)) == [finding]


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self, other):\n        self._x = 1\n        return other._x == 1\n",
        "class A:\n    __slots__ = ('_x',)\n    def f(self, other):\n        return other._x\n",
        "class A(B):\n    def f(self):\n        return self._inherited\n",
        "def f(point):\n    return point._replace(x=1)\n",
        "from __future__ import annotations\n",
        "def f():\n" + "    x = 1\n" * 49,
        "x = 1\n" * 450,
        "def f(row):\n    return row[0], row[1], row['name']\n",
        "raise Failed(str(error)) from error\n",
        "if 'a' in text:\n    x = str(error)\n",
        "class A:\n    found: int\n",
        "def found():\n    return other.kept\n",
    ],
)
def test_what_keeps_to_the_rules_is_left_alone(walls: ModuleType, source: str) -> None:
    assert list(walls.findings_in("care/gc.py", source)) == []


def test_members_of_other_projects_are_allowed_where_the_table_says_so(walls: ModuleType) -> None:
    source = "def f(tensor):\n    return tensor._indices()\n"
    assert list(walls.findings_in("codec/torch_types.py", source)) == []
    assert list(walls.findings_in("codec/numpy_types.py", source)) != []


def test_the_table_of_foreign_members_has_no_needless_row(walls: ModuleType) -> None:
    for module, name in walls.FOREIGN_MEMBERS:
        assert name in (walls.SOURCE / module).read_text()


@pytest.mark.parametrize("module", ["care/keeping.py", "care/kept.py", "store/files_found.py", "index/stored.py"])
def test_modules_are_nouns(walls: ModuleType, module: str) -> None:
    assert [text.partition(":")[0] for _, text in walls.findings_in(module, "x = 1\n")] == ["modules are nouns"]


@pytest.mark.parametrize(
    "module", ["crypto/keyring.py", "care/kept_states.py", "care/read_only.py", "care/__init__.py"]
)
def test_nouns_may_end_like_anything(walls: ModuleType, module: str) -> None:
    assert list(walls.findings_in(module, "x = 1\n")) == []


def test_the_list_of_nouns_has_no_needless_one(walls: ModuleType) -> None:
    last_words = {path.stem.rpartition("_")[2] for path in walls.SOURCE.rglob("*.py")}
    assert set(walls.NOUNS) <= last_words


def test_too_many_modules_in_the_root_are_seen(walls: ModuleType, tmp_path: Path) -> None:
    package(tmp_path, **dict.fromkeys("abcdefghij", ""), room__many="")
    assert list(walls.findings(tmp_path)) == []
    package(tmp_path, k="")
    assert list(walls.findings(tmp_path)) == [("__init__.py", 1, "11 modules in the root, at most 10")]


def test_a_package_may_not_use_any_more_often_than_before(
    walls: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(walls, "MAX_ANY", {"room": 2})
    package(tmp_path, room__a="from typing import Any\nx: Any\n", room__b="y: Any\n", other="Anything = object\n")
    assert list(walls.findings(tmp_path)) == []
    package(tmp_path, room__c="def f(z: list[Any]): ...\n", other="x: Any\n")
    assert [(place, text.partition(":")[0]) for place, _, text in walls.findings(tmp_path)] == [
        ("other.py", "1 uses of Any, at most 0"),
        ("room", "3 uses of Any, at most 2"),
    ]


@pytest.mark.parametrize("call", ["os.execv(p, argv)", "os.system(t)", "subprocess.run(a)", "subprocess.Popen(a)"])
def test_programs_are_started_where_their_words_are_known(walls: ModuleType, call: str) -> None:
    [(line, text)] = walls.findings_in("care/gc.py", call + "\n")
    assert (line, "starts a program" in text) == (1, True)
    assert list(walls.findings_in("cli/commands/runs.py", call + "\n")) == []
    assert list(walls.findings_in("care/gc.py", "worker.run(job)\n")) == []


@pytest.mark.parametrize("call", ["os.mkdir(path)", "path.mkdir(parents=True)", "os.makedirs(path)", "path.mkdir()"])
def test_directories_of_a_store_have_a_mode(walls: ModuleType, call: str) -> None:
    [(line, text)] = walls.findings_in("blobs/packs.py", call + "\n")
    assert (line, "without a mode" in text) == (1, True)
    assert list(walls.findings_in("cli/app.py", call + "\n")) == []


@pytest.mark.parametrize("call", ["os.mkdir(path, 0o700)", "path.mkdir(mode=0o700)", "path.mkdir(0o700, parents=True)"])
def test_directories_with_a_mode_are_fine(walls: ModuleType, call: str) -> None:
    assert list(walls.findings_in("blobs/packs.py", call + "\n")) == []


FIELDS = "id, job, seq, step, level, parent, created_at, tags"


@pytest.mark.parametrize(
    ("source", "is_list"),
    [
        (f"def f({FIELDS}): ...\n", True),
        (f"x = ({FIELDS})\n", True),
        ("class A:\n" + "".join(f"    {name}: str\n" for name in FIELDS.split(", ")), True),
        ("A(r.id, r.job, r.seq, r.step, str(r.level), r.parent, to_us(r.created_at), pin=r.is_pinned)\n", True),
        ('x = {"id": 1, "job": 2, "seq": 3, "step": 4, "level": 5, "parent": 6, "created_us": 7, "pinned": 8}\n', True),
        ("def f(id, checkpoint_id, job, job_id, step, step_name, level, parent): ...\n", False),
        ("x = [(id, job, seq, step, level), (parent, created_at, tags)]\n", False),
    ],
)
def test_a_list_of_half_a_checkpoints_fields_is_seen(walls: ModuleType, source: str, is_list: bool) -> None:
    assert walls.lists_fields(walls.ast.parse(source)) == is_list


def test_only_so_many_files_may_list_the_fields(walls: ModuleType, tmp_path: Path) -> None:
    sources = {f"a__m{n}": f"x = ({FIELDS})\n" for n in range(9)}
    [(_, _, text)] = walls.findings(package(tmp_path, **sources))
    assert text.startswith("9 files list a checkpoint's fields, at most 8")


LAZY = "def f():\n    from . import base, rare\n    from kedge.sub.base import x\n    import json, os\n"


def test_a_lazy_import_saves_start_time(walls: ModuleType, tmp_path: Path) -> None:
    """What a module imports anyway, itself, through others or as its own package, is no lazy import."""
    source = package(tmp_path, sub__base="import json\n", sub__rare="", sub__own=LAZY)
    (source / "sub" / "__init__.py").write_text("from . import base\n")
    assert list(walls.findings(source)) == [
        ("sub/own.py", 2, "sub/base.py is imported anyway: import it at the top"),
        ("sub/own.py", 3, "sub/base.py is imported anyway: import it at the top"),
        ("sub/own.py", 4, "json is imported anyway: import it at the top"),
    ]
