"""Every call of Kedge that makes something durable or names it, found in the source; each can be taken out."""

from __future__ import annotations

import ast
import gc
import re
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import kedge

_SOURCE = Path(kedge.__file__).parent
_OF_OS = {"fsync", "fdatasync", "sync", "rename", "replace", "link"}
_OWN = {"sync_data", "sync_directory", "_sync_names", "sync_file_range", "sync_file_system", "syncfs", "renameat2"}
_OF_PATHS = {"rename", "hardlink_to", "symlink_to"}  # by one path
_SETTING = re.compile(r"PRAGMA synchronous|synchronous_commit *=")


@dataclass(frozen=True)
class Site:
    """One call, or one setting, by what it is in: the same when lines move."""

    module: str  # blobs/packs.py
    function: str
    call: str  # fsync
    number: int  # of those in this function, from 1
    line: int

    def __str__(self) -> str:
        return f"{self.module} {self.function} {self.call}" + (f" {self.number}" if self.number > 1 else "")


def find_sites() -> dict[str, Site]:
    """All of them, by name."""
    found: dict[str, Site] = {}
    for path in sorted(_SOURCE.rglob("*.py")):
        module = path.relative_to(_SOURCE).as_posix()
        counts: Counter[tuple[str, str]] = Counter()
        for function, node, call in _calls(ast.parse(path.read_text()), ()):
            counts[function, call] += 1
            site = Site(module, function, call, counts[function, call], node.lineno)
            found[str(site)] = site
    return found


def _calls(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[str, ast.expr, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _calls(child, (*inside, child.name))
            continue
        if isinstance(child, ast.Call) and (call := _durable(child)):
            yield ".".join(inside), child, call
        if isinstance(child, ast.Constant) and _is_setting(child):
            yield ".".join(inside), child, "synchronous"
        yield from _calls(child, inside)


def _is_setting(node: ast.Constant) -> bool:
    return isinstance(node.value, str) and _SETTING.search(node.value) is not None


def _durable(call: ast.Call) -> str:
    """The name of a call that is one of ours, or ""."""
    if isinstance(call.func, ast.Name):
        creates = any(keyword.arg == "mode" and ast.unparse(keyword.value) == "'create'" for keyword in call.keywords)
        return call.func.id if call.func.id in _OWN or creates else ""
    if not isinstance(call.func, ast.Attribute):
        return ""
    name, of = call.func.attr, call.func.value
    is_os = isinstance(of, ast.Name) and of.id == "os"
    if (is_os and name in _OF_OS) or name in _OWN:
        return name
    is_path = name in _OF_PATHS and len(call.args) == 1 and not isinstance(call.args[0], ast.Constant)
    return name if is_path and not is_os else ""


class _Without(ast.NodeTransformer):
    """The same source, with None in the place of one call, or "SELECT 1" for a setting."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._inside: list[str] = []
        self._count = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._inside.append(node.name)
            self.generic_visit(node)
            self._inside.pop()
            return node
        if isinstance(node, ast.Call) and _durable(node) == self._site.call and self._is_it():
            return ast.copy_location(ast.Constant(None), node)
        if isinstance(node, ast.Constant) and _is_setting(node) and self._site.call == "synchronous" and self._is_it():
            return ast.copy_location(ast.Constant("SELECT 1"), node)
        return self.generic_visit(node)

    def _is_it(self) -> bool:
        if ".".join(self._inside) != self._site.function:
            return False
        self._count += 1
        return self._count == self._site.number


@contextmanager
def removed(site: Site) -> Iterator[None]:
    """Run without this call: the code of its function is another one meanwhile, for whoever has the function."""
    import_module("kedge." + site.module.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    path = _SOURCE / site.module
    tree = ast.fix_missing_locations(_Without(site).visit(ast.parse(path.read_text())))
    changed = dict(_codes(compile(tree, str(path), "exec")))
    gc.unfreeze()  # tests/conftest.py freezes all objects before the first test, and get_objects omits frozen ones
    gc.collect()  # frozen again below, garbage would stay
    real = [
        function
        for function in gc.get_objects()
        if type(function) is types.FunctionType and function.__code__.co_filename == str(path)
    ]
    gc.freeze()
    before = [(function, function.__code__) for function in real]
    for function, code in before:
        other = changed.get((code.co_qualname, code.co_firstlineno))
        if other is not None and other.co_freevars == code.co_freevars:
            function.__code__ = other
    try:
        yield
    finally:
        for function, code in before:
            function.__code__ = code


def _codes(code: types.CodeType) -> Iterator[tuple[tuple[str, int], types.CodeType]]:
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield (inner.co_qualname, inner.co_firstlineno), inner
            yield from _codes(inner)
