"""The notice that a machine must go, and the processes that stop its containers."""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kedge.containers import preemption
from kedge.containers.preemption import Candidate, Stopper, Stoppers, wait_for_notice
from kedge.containers.programs import URGENT
from kedge.containers.runtime.batch import Batch
from kedge.containers.runtime.early import mark_path, write_mark
from kedge.containers.runtime.marks import Mark
from kedge.containers.runtime.opt_in import Wish


class _Metadata(ThreadingHTTPServer):
    """Answers as metadata services do; once all answers are given, the last one stays."""

    answers: list[tuple[int, bytes]]
    asked = 0


class _Handler(BaseHTTPRequestHandler):
    server: _Metadata

    def do_GET(self) -> None:
        status, body = self.server.answers[min(self.server.asked, len(self.server.answers) - 1)]
        self.server.asked += 1
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(name="metadata")
def _metadata() -> Iterator[_Metadata]:
    with _Metadata(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_address_that_answers(metadata: _Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_URL_TIMEOUT_S", 60)  # who was answered too late would ask once more
    url = f"http://127.0.0.1:{metadata.server_port}/preempted"
    metadata.answers = [(404, b""), (500, b"TRUE"), (200, b"FALSE"), (200, b"TRUE")]
    unreachable = "http://127.0.0.1:1/"
    assert wait_for_notice([], [unreachable, url], "TRUE", 0.001, threading.Event()) == url
    assert metadata.asked == 4
    metadata.answers, metadata.asked = [(404, b""), (200, b"{}")], 0
    assert wait_for_notice([], [url], "", 0.001, threading.Event()) == url
    assert metadata.asked == 2


def test_a_file_and_a_signal(tmp_path: Path) -> None:
    signalled = threading.Event()
    threading.Timer(0.05, signalled.set).start()
    assert wait_for_notice([tmp_path / "no"], [], "", 60, signalled) == "signal"
    (tmp_path / "yes").touch()
    assert wait_for_notice([tmp_path / "no", tmp_path / "yes"], [], "", 60, threading.Event()) == str(tmp_path / "yes")


# --- the processes that stop containers ---


def candidate(identity: str, **environment: str) -> Candidate:
    return Candidate(identity, "/nowhere", identity, 1, environment)


def test_one_process_for_each_engine(tmp_path: Path) -> None:
    marks = {"KEDGE_RUNC_STATE": str(tmp_path)}
    with Stoppers() as stoppers:
        one, same, other = candidate("a", **marks), candidate("b", **marks), candidate("a", **marks, PATH="/bin")
        assert stoppers.for_(one) is stoppers.for_(same)
        assert stoppers.for_(other) is not stoppers.for_(one)
        for asked in (one, other):  # they have no mark any more
            assert stoppers.for_(asked).stop(asked, 60) == ("ended", "it is not there any more")


def test_it_comes_first_before_it_imports_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/autogroup").exists() or os.geteuid() != 0:
        pytest.skip("of kernels that weigh sessions, and root, who may change that")  # skip: a choice of the kernel
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nread line < /proc/self/autogroup; echo "$line" > {tmp_path}/first\n')
    python.chmod(0o755)
    monkeypatch.setattr(preemption.sys, "executable", str(python))
    Stopper({}).close()
    assert (tmp_path / "first").read_text().endswith(f"nice {URGENT}\n")


def test_a_process_that_is_killed_keeps_nobody_waiting(tmp_path: Path) -> None:
    with Stoppers() as stoppers:
        one = candidate("a", KEDGE_RUNC_STATE=str(tmp_path))
        stopper = stoppers.for_(one)
        stopper.process.kill()
        stopper.process.wait()
        assert stopper.stop(one, 60) == ("unfinished", "the process that stops containers has ended: it was killed")
        while not stopper.is_gone:
            pass
        assert stoppers.for_(one).stop(one, 60)[0] == "ended"  # the next one has another process


def test_what_cannot_be_kept_gets_its_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the store cannot be opened: whoever is asked to stop must."""
    runc = tmp_path / "runc"
    runc.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\necho no such thing >&2\nexit 1\n')
    runc.chmod(0o755)
    (tmp_path / "file").touch()
    monkeypatch.setenv("KEDGE_RUNC_STATE", str(tmp_path / "marks"))
    monkeypatch.setenv("KEDGE_RUNC", str(runc))
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "file"))
    write_mark(mark_path("/nowhere", "one"), json.dumps({"wish": {"key": "k"}, "restored": None}))
    result, reason = Batch().stop("/nowhere", "one", 60)
    assert result == "signalled"
    assert "is not a directory" in reason
    assert reason.endswith("no such thing")
    assert (tmp_path / "called").read_text() == "--root /nowhere kill one TERM\n"
    assert json.loads(Path(mark_path("/nowhere", "one")).read_text())["killed"] is True
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "store"))
    batch = Batch()
    assert "runc state one: no such thing" in batch.stop("/nowhere", "one", 60)[1]
    batch.close()


def test_who_was_asked_to_stop_gets_its_signal_though_the_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runc = tmp_path / "runc"
    runc.write_text(
        f"#!/bin/sh\n[ -e {tmp_path}/killed ] || {{ touch {tmp_path}/killed; kill -9 $PPID; }}\n"
        f'echo "$@" >> {tmp_path}/called\nexit 1\n'
    )
    runc.chmod(0o755)
    monkeypatch.setenv("KEDGE_RUNC_STATE", str(tmp_path / "marks"))
    write_mark(mark_path("/nowhere", "one"), json.dumps({"wish": {"key": "k"}, "restored": None}))
    one = candidate("one", KEDGE_RUNC=str(runc), KEDGE_STORE=str(tmp_path / "store"))
    monkeypatch.setattr(preemption, "candidates", lambda _: [one])
    (outcome,) = preemption.preempt(60)
    assert (tmp_path / "killed").exists()
    assert outcome.result == "signalled"
    assert "has ended" not in outcome.reason
    assert "--root /nowhere kill one TERM\n" in (tmp_path / "called").read_text()


def test_who_is_not_done_in_time_was_not_signalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still be stored, or run on: nobody knows, and that is what is told."""
    os.mkfifo(tmp_path / "held")
    runc = tmp_path / "runc"
    runc.write_text(f"#!/bin/sh\nread -r word <{tmp_path}/held\nexit 1\n")
    runc.chmod(0o755)
    monkeypatch.setenv("KEDGE_RUNC_STATE", str(tmp_path / "marks"))
    write_mark(mark_path("/nowhere", "one"), json.dumps({"wish": {"key": "k"}, "restored": None}))
    one = candidate("one", KEDGE_RUNC=str(runc), KEDGE_STORE=str(tmp_path / "store"))
    monkeypatch.setattr(preemption, "candidates", lambda _: [one])
    monkeypatch.setattr(preemption, "_LEFT_S", 0.0)
    (outcome,) = preemption.preempt(0.2)
    assert (outcome.result, outcome.reason) == ("unfinished", "it took longer than 0 s")
    os.close(os.open(tmp_path / "held", os.O_RDWR))  # whoever reads there, if anybody got so far, goes on


def test_what_another_call_has_kept_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that was killed before it could say so: the runtime does not know the container any more."""
    monkeypatch.setenv("KEDGE_RUNC_STATE", str(tmp_path / "marks"))
    monkeypatch.setenv("KEDGE_RUNC", "/bin/false")
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("KEDGE_STATE_DIR", str(tmp_path / "state"))
    for fact in ("ended", "ending"):
        write_mark(mark_path("/nowhere", fact), json.dumps({"wish": {"key": "k"}, fact: 1.0}))
        batch = Batch()
        assert batch.stop("/nowhere", fact, 60) == ("checkpointed", "")
        batch.close()


def test_two_in_one_network_are_not_frozen_at_once(tmp_path: Path) -> None:
    def bundle(name: str, *namespaces: dict[str, str]) -> Mark:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"linux": {"namespaces": namespaces}}))
        return Mark(Wish("k", "latest"), str(tmp_path / name))

    shared = {"type": "network", "path": "/run/netns/pod"}
    batch = Batch()
    first = batch.alone_in_network(bundle("a", shared))
    assert first is batch.alone_in_network(bundle("b", shared))
    assert first is not batch.alone_in_network(bundle("c", {**shared, "path": "/run/netns/other"}))
    with first, batch.alone_in_network(bundle("d", {"type": "network"})), batch.alone_in_network(bundle("e")):
        pass
