"""What is said of a dump that failed."""

from pathlib import Path

import pytest

from kedge.containers.attempts import attempt
from kedge.containers.criu.command import Dump, dump
from kedge.errors import CriuFailed

# Complains of something harmless that the table of causes knows, as CRIU does in a dump that goes well; then it ends.
CRIU = """#!/bin/sh
echo "(00.01) Error (criu/sockets.c:131): sk unix: Can't dump unlinked socket" >{log}
{end}
"""


@pytest.mark.parametrize(("end", "is_below_a_shell", "is_killed"), [
    ("kill -9 $$", False, True), ("kill -9 $$", True, True), ("exit 1", False, False),
])  # fmt: skip
def test_a_dump_whose_program_was_killed_has_no_other_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, is_below_a_shell: bool, is_killed: bool
) -> None:
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / "state"))
    criu = tmp_path / "criu"
    criu.touch(0o755)
    with attempt("checkpoint", "one") as under_way:
        criu.write_text(CRIU.format(log=under_way.path / "dump.log", end=end))
        forget = ("true",) if is_below_a_shell else ()
        with pytest.raises(CriuFailed) as caught:
            dump(Dump([str(criu)], forget), attempt=under_way, at_pause=lambda: None)
    assert ("criu was killed" in str(caught.value)) == is_killed
    assert caught.value.is_verdict == (not is_killed)
