"""The words of a message: what is marked is shown as it was meant, and nothing of it is lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.server.page.markdown import Block, Span, blocks


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("plain", [Block([Span("plain")])]),
        ("run `ls -l` **now**", [Block([Span("run "), Span("ls -l", "code"), Span(" "), Span("now", "bold")])]),
        ("# Title\n#5 is no title", [Block([Span("Title", "bold"), Span("\n"), Span("#5 is no title")])]),
        ("before\n\n```sh\nls\n\nrm\n```\nafter",
         [Block([Span("before")]), Block([Span("ls\n\nrm")], is_code=True), Block([Span("after")])]),
        ("```\ncut", [Block([Span("cut")], is_code=True)]),
        ("```one line```", [Block([Span("``"), Span("one line", "code"), Span("``")])]),
        ("```\n```python\n```", [Block([Span("```python")], is_code=True)]),
        ("2 ** 3 ** 4 and one `", [Block([Span("2 ** 3 ** 4 and one `")])]),
        ("", []),
    ],
)  # fmt: skip
def test_marks(text: str, said: list[Block]) -> None:
    assert blocks(text) == said


@given(st.text(alphabet="a `*#\n", max_size=60))
def test_every_word_is_kept(text: str) -> None:
    said = "".join(span.text for block in blocks(text) for span in block.spans)
    languages = re.compile(r"^ *```[^`\n]*$", re.MULTILINE)
    assert languages.sub("", text).count("a") <= said.count("a") <= text.count("a")
