"""Failures of CRIU in words: for each pattern a line as CRIU prints it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.containers.criu import log as criu_log
from kedge.containers.criu.log import entries, explain, gave_up

LINES = dict(line.split(": ", 1) for line in Path(__file__).with_name("criu_lines.txt").read_text().splitlines())


@pytest.mark.parametrize("code", [row.code for row in entries()])
def test_each_pattern_has_a_line_that_it_is_the_first_to_know(code: str) -> None:
    end = "(00.02) Error (criu/cr-dump.c:2128): Dumping FAILED."
    cause = explain(f"(00.000001) Version: 4.1.1\n(00.012345)     12: {LINES[code]}\n{end}")
    assert cause is not None
    assert cause.code == code
    assert cause.cause
    assert cause.fix
    assert "{" not in str(cause)


def test_there_are_enough_and_each_is_named_once() -> None:
    codes = [row.code for row in entries()]
    assert len(codes) == len(set(codes)) >= 25
    assert set(LINES) == set(codes)


def test_what_follows_from_any_failure_is_no_cause() -> None:
    cause = explain("(00.2) Error (criu/cgroup.c:2055): cg: cgroupd: recv req error: No such file or directory")
    assert cause is not None
    assert cause.code == "unknown"


def test_one_that_was_killed_did_not_give_up() -> None:
    harmless = "(00.000001) Error (criu/util.c:641): Can't setup RLIMIT_NOFILE for self"
    assert not gave_up("")
    assert not gave_up(f"{harmless}\n(00.2) Restoring namespaces 8 flags 0x6c028000\n")
    assert gave_up(f"{harmless}\n(00.3) Error (criu/cr-restore.c:2536): Restoring FAILED.\n")
    assert gave_up(f"(00.3)      1: {LINES['file-size']}\n")


def test_what_was_captured_is_said() -> None:
    cause = explain(LINES["file-size"])
    assert cause is not None
    assert "data/state.log" in cause.cause
    assert "120 bytes" in cause.cause


def test_the_first_error_known_is_the_cause_and_not_what_came_of_it() -> None:
    log = [
        "(00.001) Warn  (criu/kerndat.c:1): No space left on device",
        "(00.002) Error (criu/something.c:1): a line that nobody knows",
        "(00.003) " + LINES["tcp-established"],
        "(00.004) Error (criu/cr-dump.c:1): Dump files (pid: 12) failed with -1",
        "(00.005) " + LINES["no-space"],
    ]
    cause = explain("\n".join(log))
    assert cause is not None
    assert cause.code == "tcp-established"
    assert cause.line == log[2]


def test_an_error_without_words_is_told_as_it_is() -> None:
    cause = explain("(00.002) Error (criu/something.c:1): net: a line that nobody knows\n")
    assert cause is not None
    assert (cause.code, cause.cause) == ("unknown", "CRIU stopped with: net: a line that nobody knows")


def test_a_log_of_success_says_nothing() -> None:
    assert explain("(00.1) Error (criu/cgroup.c:1): cgroupns not supported. This is not fatal.\n") is None
    assert explain("(00.1) Dumping finished successfully\n") is None
    assert explain("") is None


@given(st.text(max_size=2000))
def test_any_text_whatever(text: str) -> None:
    explain(text)
    explain("Error (criu/x.c:1): " + text)


def test_a_huge_log_is_read_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    log = "x" * 100_000 + "\n" + LINES["file-locks"] + "\n"
    cause = explain(log)
    assert cause is not None
    assert cause.code == "file-locks"
    monkeypatch.setattr(criu_log, "MAX_LOG_BYTES", 50_000)
    assert explain(log) is None
