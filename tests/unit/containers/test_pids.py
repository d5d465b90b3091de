"""What /proc and the kernel say of processes."""

from __future__ import annotations

import os
import resource
import subprocess

import pytest

from kedge.containers.pids import hides_limits


def test_limits_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hides_limits(os.getpid())
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert not hides_limits(gone.pid)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(resource, "prlimit", refuse)
    assert hides_limits(os.getpid())
