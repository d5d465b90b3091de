"""A bar for long work keeps to one line, whatever it is called."""

from __future__ import annotations

import io
import re

import pytest

from kedge.terminal import progress as bars


@pytest.mark.parametrize("width", [70, 80, 120])
def test_a_bar_keeps_to_one_line(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(bars, "_QUIET_S", 0.0)
    with bars.progress("copying to postgresql://a.very.long.host.example/database", unit="bytes") as report:
        assert report is not None
        report(3 << 30, 40 << 30)
    drawn = out.getvalue()
    lines = [re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", line) for line in drawn.split("\r")]
    bar = next(line for line in lines if "copying" in line and "3.0 GiB of 40 GiB" in line)
    assert len(bar.rstrip("\n")) <= width
    assert "━" in bar
    assert drawn.count("\n") <= 1
