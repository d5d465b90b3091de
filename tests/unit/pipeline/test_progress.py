"""What is shown of a run at work, and that the time left is not fooled by what was done before."""

import errno
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

import kedge
from kedge.pipeline.progress import Lines, Tally, Terminal, Watcher, duration, watcher


def test_the_time_left_comes_from_this_sessions_rate() -> None:
    now = [0.0]
    tally = Tally(1000, clock=lambda: now[0])
    tally.reused = 900
    assert tally.left_s is None  # 900 in no time tell nothing
    now[0] = 10.0
    tally.done = 20
    assert tally.rate == 2
    assert tally.left_s == 40
    assert str(tally) == "920 of 1,000 items (900 of them before), 2/s, 40 s left"
    assert str(Tally(None, done=3, clock=lambda: 0.0)).startswith("3 items")


def test_durations() -> None:
    shown = [duration(s) for s in (7e-5, 0.0123, 0.5, 9.4, 61, 600, 8000)]
    assert shown == ["70 µs", "12 ms", "500 ms", "9.4 s", "1 min 1 s", "10 min 0 s", "2 h 13 min"]


def pipeline(store: object, **options: object) -> None:
    with kedge.run("r", store=store, **options) as run:  # type: ignore[arg-type]
        with run.stage("part\x1b[31m"):
            run.step("one", lambda: 1)
        run.map(abs, range(5), name="items")
        with pytest.raises(ZeroDivisionError):
            run.step("broken", lambda: 1 / 0)


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with kedge.open("memory:") as store:
        pipeline(store)
        assert capsys.readouterr().err == ""  # not asked for, and no terminal
        pipeline(store, progress=True)
        first, *lines = capsys.readouterr().err.splitlines()
        assert first == "kedge: stage part?[31m"
        assert lines[:2] == [
            "kedge: step part?[31m/one reused",
            "kedge: map items: 5 of 5 items (5 of them before)",
        ]
        assert lines[2] == "kedge: step broken failed: ZeroDivisionError: division by zero (kept)"


def test_a_terminal() -> None:
    out = io.StringIO()
    shown = Terminal(Console(file=out, force_terminal=True, width=100))
    shown.stage(("a",))
    shown.step(("a", "one"), "ran", 1.5)
    shown.step(("a", "two [x]"), "reused")
    shown.step(("bad",), "failed", note="ValueError: no")
    tally = Tally(10)
    tally.done = 4
    shown.items(("m",), tally, is_over=False)
    tally.done = 10
    shown.items(("m",), tally, is_over=True)
    shown.close()
    text = out.getvalue()
    for part in ("✓", "↺", "✗", "1.5 s", "two [x]", "ValueError: no", "10 of 10 items"):
        assert part in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_after_a_resume_keeps_to_one_line(width: int) -> None:
    out = io.StringIO()
    shown = Terminal(Console(file=out, force_terminal=True, width=width, no_color=True))
    tally = Tally(total=100_000, done=1200, reused=45_000, failed=3, money="$12.30 for 1,200 calls")
    shown.items(("nightly import", "tiles of the whole country"), tally, is_over=False)
    drawn = out.getvalue()
    shown.close()
    assert "\n" not in drawn
    lines = [re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", line) for line in drawn.split("\r")]
    assert max(map(len, lines)) <= width
    assert re.search(r"nightl.*… ━+.* 46,200 of 100,000 items", lines[-1])


def test_who_watches(tmp_path: Path) -> None:
    assert isinstance(watcher(None), Watcher)
    assert isinstance(watcher(False), Watcher)
    assert isinstance(watcher(True), Lines)
    broken = Lines((tmp_path / "x").open("w"))
    broken._out.close()
    broken.stage(("a",))  # a closed stderr does not stop a run


def test_a_terminal_that_is_gone_fails_no_run() -> None:
    class Gone(io.StringIO):
        def write(self, text: str, /) -> int:
            raise OSError(errno.EIO, "the terminal is gone")

    watcher = Terminal(Console(file=Gone(), force_terminal=True))
    watcher.stage(("fetch",))
    watcher.step(("fetch", "page"), "ran", 0.1)
    watcher.items(("map",), Tally(3), is_over=False)
    watcher.items(("map",), Tally(3), is_over=True)
    watcher.say("already completed")
    watcher.close()
