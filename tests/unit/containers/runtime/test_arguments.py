"""runc's command line: read as runc reads it, and rebuilt without loss."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kedge
from kedge.containers.runtime.arguments import COMMAND_FLAGS, GLOBAL_FLAGS, Flag, parse

_VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
_IDS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_+.-]{0,10}", fullmatch=True)


def test_what_an_engine_calls_for_a_new_container() -> None:
    words = "--root /run/containerd/runc/k8s.io --log /b/log.json --log-format json --systemd-cgroup create "
    call = parse((words + "--bundle /b --pid-file /b/init.pid --no-pivot --preserve-fds=2 c1").split())
    assert call.problem is None
    assert (call.command, call.container_id, call.rest) == ("create", "c1", ())
    assert call.get("root") == "/run/containerd/runc/k8s.io"
    assert call.get("bundle") == "/b"
    assert call.is_set("systemd-cgroup")
    assert not call.is_set("debug")
    assert call.to_restore("/img", "/work", ["--tcp-established"]) == [
        "--root=/run/containerd/runc/k8s.io", "--systemd-cgroup", "restore",
        "--bundle=/b", "--pid-file=/b/init.pid", "--no-pivot", "--detach", "--no-subreaper",
        "--image-path=/img", "--work-path=/work", "--tcp-established", "c1",
    ]  # fmt: skip
    assert call.other("pause") == ["--root=/run/containerd/runc/k8s.io", "--systemd-cgroup", "pause", "c1"]


def test_create_flags_that_mean_nothing_to_a_restore_are_dropped() -> None:
    call = parse(
        ["create", "--no-new-keyring", "--preserve-fds", "1", "--pidfd-socket=/s", "--console-socket", "/c", "x"]
    )
    assert call.to_restore("/i", "/w") == [
        "restore", "--console-socket=/c", "--detach", "--no-subreaper", "--image-path=/i", "--work-path=/w", "x",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "", "--version", "-v", "--help", "create --help", "checkpoint --help", "restore --lsm-mount-context",
        "--unknown create x", "create --unknown x", "nothing x", "create --no-pivot=maybe x", "create --bundle",
        "c", "delete --force -f x",
    ],
)  # fmt: skip
def test_what_is_not_ours_is_a_problem_and_no_error(line: str) -> None:
    assert parse(line.split()).problem


def test_probes_that_have_no_container() -> None:
    for line in ("features", "list --format json", "spec"):
        call = parse(line.split())
        assert (call.problem, call.container_id) == (None, "")


def test_switches_may_be_turned_off_and_the_last_word_counts() -> None:
    call = parse(["delete", "--force", "--force=false", "x"])
    assert not call.is_set("force")
    assert parse(["create", "-b", "/1", "-b=/2", "x"]).get("bundle") == "/2"


def test_words_of_another_program_are_left_alone() -> None:
    call = parse(["exec", "-t", "--env", "A=B", "x", "sh", "-c", "--tty"])
    assert (call.container_id, call.rest) == ("x", ("sh", "-c", "--tty"))
    assert parse(["ps", "-f", "json", "x", "-f"]).rest == ("-f",)


def test_kill_with_a_signal_and_flags_behind_the_id() -> None:
    call = parse(["--root", "/r", "kill", "--all", "x", "15"])
    assert (call.container_id, call.rest, call.is_set("all")) == ("x", ("15",), True)
    assert parse(["checkpoint", "x", "--image-path", "/i", "--leave-running"]).get("image-path") == "/i"


def _spelled(flag: tuple[str, bool], value: str, *, joined: bool, alias: bool) -> tuple[list[str], Flag]:
    names, takes_value = flag[0].split("/"), flag[1]
    name = names[-1] if alias else names[0]
    dashes = "-" if len(name) == 1 else "--"
    if not takes_value:
        return [f"{dashes}{name}"], Flag(names[0], True)
    return ([f"{dashes}{name}={value}"] if joined else [f"{dashes}{name}", value]), Flag(names[0], value)


def _flags(table: str, *, alias: bool) -> st.SearchStrategy[list[tuple[list[str], Flag]]]:
    known = [(word.removesuffix(":"), word.endswith(":")) for word in table.split() if not word.startswith("version")]
    if not known:
        return st.just([])
    one = st.builds(_spelled, st.sampled_from(known), _VALUES, joined=st.booleans(), alias=st.just(alias))
    return st.lists(one, max_size=6)


@given(st.data(), st.sampled_from(sorted(set(COMMAND_FLAGS) - {"help", "init"})), _IDS, st.lists(_IDS, max_size=2))
def test_every_spelling_of_every_flag_comes_back(data: st.DataObject, command: str, name: str, rest: list[str]) -> None:
    alias = data.draw(st.booleans())  # runc refuses both forms of one flag in one call
    before = data.draw(_flags(GLOBAL_FLAGS, alias=alias))
    flags = data.draw(_flags(COMMAND_FLAGS[command], alias=alias))
    words = [*(w for f in before for w in f[0]), command, *(w for f in flags for w in f[0]), name, *rest]
    call = parse(words)
    assert call.problem is None
    assert [*call.options] == [flag for _, flag in before]
    assert [*call.flags] == [flag for _, flag in flags]
    assert call.arguments == (name, *rest)
    words = [word for flag in (*call.options, *call.flags) for word in flag.words()]
    again = parse([*words[: len(call.options)], call.command, *words[len(call.options) :], *call.arguments])
    assert (again.options, again.flags, again.arguments) == (call.options, call.flags, call.arguments)


@given(st.lists(st.one_of(_VALUES, st.sampled_from(["--", "-", "--root", "create", "kill", "-f", "x"])), max_size=8))
def test_no_words_whatever_are_an_error(words: list[str]) -> None:
    call = parse(words)
    assert call.argv == tuple(words)


# Against the program itself.


def _help_of(*words: str) -> dict[str, bool]:
    """The flags runc says it has: every spelling, and whether a value follows."""
    text = subprocess.run(["runc", *words, "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
    _, _, options = text.partition("OPTIONS:")
    found = {}
    for line in re.findall(r"^   (-.*?)(?:  |$)", options, re.MULTILINE):
        for spelling in line.split(", "):
            name, _, value = spelling.lstrip("-").partition(" ")
            found[name] = bool(value)
    return found


def _spellings(table: str) -> dict[str, bool]:
    return {name: word.endswith(":") for word in table.split() for name in word.removesuffix(":").split("/")}


@pytest.mark.requires("runc")
def test_the_tables_are_those_of_the_runc_on_this_machine() -> None:
    help_text = subprocess.run(["runc", "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
    _, _, listed = help_text.partition("COMMANDS:")
    commands = re.findall(r"^   (\w+)", listed.partition("GLOBAL")[0], re.MULTILINE)
    assert set(commands) <= set(COMMAND_FLAGS)
    for command in [None, *commands]:
        if command == "help":
            continue
        theirs = _help_of(*([command] if command else []))
        ours = _spellings(COMMAND_FLAGS[command] if command else GLOBAL_FLAGS)
        assert {name: theirs[name] for name in theirs if name not in ("help", "h")}.items() <= ours.items(), command


_WORDS = [
    "--force",
    "-f",
    "--all",
    "x",
    "y",
    "9",
    "--",
    "-",
    "--image-path",
    "--image-path=/i",
    "--leave-running",
    "-z",
]


@pytest.mark.requires("runc")
@settings(max_examples=60)
@given(st.sampled_from(["delete", "kill", "checkpoint", "state"]), st.lists(st.sampled_from(_WORDS), max_size=5))
def test_runc_takes_what_we_take_and_counts_the_same_words(command: str, words: list[str]) -> None:
    argv = ["--root", "/nonexistent/kedge-test", command, *words]
    said = subprocess.run(["runc", *argv], capture_output=True, text=True, check=False, timeout=60)
    output = said.stdout + said.stderr
    call = parse(argv)
    is_usage = "Incorrect Usage:" in output  # the flags; a wrong number of arguments is said otherwise
    assert is_usage == (call.problem is not None), output
    if not is_usage:
        most = 2 if command == "kill" else 1
        assert ("argument" in output and "requires" in output) == (not 1 <= len(call.arguments) <= most), output


def test_importing_it_needs_nothing_but_the_interpreter() -> None:
    source = Path(kedge.__file__).parents[1]
    program = (
        f"import sys; sys.path.insert(0, {str(source)!r}); before = set(sys.modules); "
        "import kedge.containers.runtime.arguments; print(*sorted(set(sys.modules) - before))"
    )
    said = subprocess.run([sys.executable, "-ISc", program], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.split() == [
        "__future__", "kedge", "kedge.containers", "kedge.containers.runtime",
        "kedge.containers.runtime.arguments", "kedge.version",
    ]  # fmt: skip
