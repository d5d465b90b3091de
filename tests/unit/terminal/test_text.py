"""Text for terminals: nothing stored by a user may act on one, and tables keep to its width."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.terminal.tables import Column, facts_layout, layout
from kedge.terminal.text import age, clip, count_of, labelled, pieces, safe, size, width_of, with_article

ESCAPES = [
    "\x1b[2J",
    "\x9b31m",
    "\r",
    "\n",
    "\x07",
    "\x7f",
    "\u202e",
    "\u2066",
    "\u200b",
    "\ud800",
    "\u2028",
    "\U000e0041",
]
NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize("hostile", ESCAPES)
def test_safe_leaves_nothing_to_act_on(hostile: str) -> None:
    shown = safe(f"a{hostile}b")
    assert shown.isprintable()
    assert shown.startswith("a")
    assert shown.endswith("b")


@given(st.text())
def test_safe_text_is_one_printable_line(text: str) -> None:
    shown = safe(text)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    shown.encode()


def test_safe_keeps_what_people_write() -> None:
    for text in ("plain", "Überprüfung", "日本語", "emoji 🎉", "a\\b", "naïve café"):
        assert safe(text) == text


@given(st.text(), st.integers(1, 40))
def test_clip_never_exceeds_the_width(text: str, width: int) -> None:
    assert width_of(clip(safe(text), width)) <= width


@given(st.text(alphabet="ab 日é", max_size=80), st.integers(2, 30))
def test_pieces_keep_all_characters_and_the_width(text: str, width: int) -> None:
    lines = list(pieces(text, width))
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(width_of(line) <= width for line in lines)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (10_240, "10 KiB"), (1 << 20, "1.0 MiB"), (5 << 40, "5.0 TiB")],
)
def test_sizes(count: int, shown: str) -> None:
    assert size(count) == shown


@pytest.mark.parametrize(
    ("past", "shown"),
    [
        (timedelta(), "now"),
        (timedelta(seconds=59), "59 s ago"),
        (timedelta(minutes=5), "5 min ago"),
        (timedelta(hours=47), "47 h ago"),
        (timedelta(days=3), "3 days ago"),
        (timedelta(days=90), "2026-01-31"),
        (timedelta(seconds=-5), "in the future"),
    ],
)
def test_ages(past: timedelta, shown: str) -> None:
    assert age(NOW - past, NOW) == shown


def test_counts_have_their_plural() -> None:
    assert count_of(1, "job") == "1 job"
    assert count_of(2000, "job") == "2,000 jobs"


def test_labelled_text_is_broken_between_words() -> None:
    lines = [plain(line) for line in labelled("hint:", "warn", "word\x1b " * 20, 40)]
    assert lines[0].startswith("hint: word\\x1b word")
    assert all(line.startswith("      word") and len(line) <= 40 for line in lines[1:])
    assert list(labelled("x", "", "", 40)) == ["x "]


def test_nouns_have_their_article() -> None:
    assert (with_article("dict"), with_article("OrderedDict"), with_article("int")) == (
        "a dict",
        "an OrderedDict",
        "an int",
    )


COLUMNS: tuple[Column[str], ...] = (
    Column("#", str, ">", is_whole=True),
    Column("ID", str, is_whole=True),
    Column("STEP", str, drop=1, least=8),
    Column("AGE", str, drop=2, is_whole=True),
    Column("EMPTY", str),
)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@given(
    st.lists(st.tuples(st.integers(1, 120), st.text(alphabet="xyz 日", max_size=60)), min_size=1, max_size=8),
    st.integers(40, 200),
)
def test_tables_fit_and_ids_stay_whole(rows: list[tuple[int, str]], width: int) -> None:
    cells = [[str(n), "i" * length, step, "5 min ago", ""] for n, (length, step) in enumerate(rows)]
    lines = [plain(line) for line in layout(COLUMNS, cells, width)]
    assert all(width_of(line) <= width for line in lines)
    joined = "".join(lines)
    for _, checkpoint_id, *_ in cells:
        assert checkpoint_id in joined
    assert "EMPTY" not in joined


def test_without_a_terminal_nothing_is_cut() -> None:
    cells = [["1", "id" * 100, "step " * 50, "now", ""]]
    header, row = layout(COLUMNS, cells, None)
    assert "id" * 100 in row
    assert ("step " * 50).strip() in row
    assert "STEP" in header


def test_facts_are_wrapped_below_their_value() -> None:
    lines = [plain(line) for line in facts_layout([("tags", "a=1"), ("metadata", "word " * 30)], 40)]
    assert lines[0] == "tags      a=1"
    assert all(len(line) <= 40 for line in lines)
    assert all(line.startswith(" " * 10) for line in lines[2:])
