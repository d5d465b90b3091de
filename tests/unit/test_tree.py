"""What may stand nowhere in the tree: a name the project no longer has, and advice that cannot be followed yet."""

from __future__ import annotations

import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD_NAME = re.compile(rb"hold[-_ ]?fast", re.IGNORECASE)
# Prefixes and magics that were made of the old name: HFPACK1, HF_STORE, hf_index, hf1.
OLD_PREFIX = re.compile(rb"(?<![A-Za-z0-9+/=])(?:HF[A-Z0-9_]|hf_|hf[0-9])")
OLD_MAGIC = re.compile(rb"HF[A-Z0-9]")
# Names of other projects and digests, where two letters prove nothing.
FOREIGN = ("requirements/", "src/kedge/server/page/package-lock.json")

BY_NAME = re.compile(
    r"""\b(?:pip3?|pipx|uv\ pip|uv\ tool|uv|poetry|conda)\ +(?:install|add|run)\b  # the installer …
        [^\n`,;]*?(?<!-package)[ '"]kedge\b(?![/.-])                               # … and the package by its name
    """,
    re.VERBOSE,
)
EXTRA_BY_NAME = re.compile(r"\bkedge\[[a-z]")


def tree() -> Iterator[Path]:
    """Every file that is committed or could be."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = (ROOT / name.decode() for name in listed.stdout.split(b"\0") if name)
    return (path for path in paths if path.is_file() and path != Path(__file__))


def traces_in_text(data: bytes, *, is_foreign: bool = False) -> list[str]:
    patterns = [OLD_NAME] if is_foreign else [OLD_NAME, OLD_PREFIX]
    return [match.group().decode() for pattern in patterns for match in pattern.finditer(data)]


def traces_in_binary(data: bytes) -> list[str]:
    """Two letters come about by chance in compressed bytes, but not at their beginning."""
    matches = [*OLD_NAME.finditer(data), *filter(None, [OLD_MAGIC.match(data)])]
    return [match.group().decode() for match in matches]


def traces(path: Path) -> Iterator[str]:
    name = path.relative_to(ROOT).as_posix()
    data = path.read_bytes()
    texts = traces_in_text(name.encode())
    texts += traces_in_binary(data) if b"\0" in data else traces_in_text(data, is_foreign=name.startswith(FOREIGN))
    yield from (f"{name}: {text}" for text in texts)
    if name.endswith((".tar", ".tar.gz", ".tar.xz")):
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member)
                inside = traces_in_text(member.name.encode()) + traces_in_binary(file.read() if file else b"")
                yield from (f"{name}, {member.name}: {text}" for text in inside)


def test_the_old_name_is_nowhere() -> None:
    assert [trace for path in tree() for trace in traces(path)] == []


@pytest.mark.mutant
@pytest.mark.parametrize(
    "data", [b"Hold" + b"fast", b"HOLD" + b"FAST_KEY", b"b'HF" + b"PACK1'", b"x = hf" + b"_index", b"hf" + b"1:"]
)
def test_each_form_of_the_old_name_is_seen(data: bytes) -> None:
    assert traces_in_text(b"a line\n" + data)


@pytest.mark.mutant
def test_the_old_name_is_seen_in_binary_files() -> None:
    assert traces_in_binary(b"HF" + b"PACK1\n\0\0")
    assert traces_in_binary(b"\0\0 hold" + b"fast \0")
    assert not traces_in_binary(b"\0\0HF" + b"X")


def advice(text: str) -> list[str]:
    """Places that tell somebody to install Kedge by its name alone: no index has it before the first release."""
    return [match.group() for pattern in (BY_NAME, EXTRA_BY_NAME) for match in pattern.finditer(text)]


def test_nobody_is_told_to_install_what_no_index_has() -> None:
    allowed = {"pyproject.toml": 1}  # the extra `all` names the others
    advised = {}
    for path in tree():
        data = path.read_bytes()
        if b"\0" not in data and (places := advice(data.decode())):
            advised[path.relative_to(ROOT).as_posix()] = places
    wrong = {name: places for name, places in advised.items() if len(places) > allowed.get(name, 0)}
    assert wrong == {}, "say from where: `pip install .` in a clone"


@pytest.mark.mutant
@pytest.mark.parametrize(
    "line",
    [
        "pip install kedge",
        "pip install -U kedge",
        "python -m pip install --upgrade kedge",
        "pip install 'kedge[server]'",
        'hint="needs kedge[llm]"',
        "uv add kedge",
        "uv tool install kedge",
        "pipx install kedge",
    ],
)
def test_each_way_to_say_it_is_seen(line: str) -> None:
    assert advice(f"First:\n{line}\n")


@pytest.mark.parametrize(
    "line", ["pip install .", "pip install '.[server]'", "pip install ./kedge", "pip install ormsgpack"]
)
def test_a_place_is_fine(line: str) -> None:
    assert not advice(line)
