"""Rules that the tests themselves keep, so that they fail only when the code is wrong and never stop proving."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

RULES = {
    # A sleep that orders threads is right until the machine is busy.
    "sleep": (
        re.compile(r"\b(?:time|asyncio|page)\.(?:sleep|wait_for_timeout)\b|from (?:time|asyncio) import .*\bsleep\b"),
        "waiting.py",
        "wait for a condition with tests/waiting.py, or say with `# sleep: …` why the time itself is meant",
    ),
    # A skip of its own would not fail in CI, where KEDGE_REQUIRE=all wants every part.
    "skip": (
        re.compile(r"\bimportorskip\b|\bpytest\.skip\(|\bmark\.skip(?:if)?\b"),
        "parts.py",
        "ask for it with `require` or `library` of tests/parts.py, or say with `# skip: …` why CI may skip it too",
    ),
}


def offences(rule: str, text: str) -> list[int]:
    """Lines that break the rule. Programs inside of strings keep to it like the tests that start them."""
    pattern = RULES[rule][0]
    lines = enumerate(text.splitlines(), 1)
    return [number for number, line in lines if pattern.search(line) and not re.search(rf"# {rule}: [\w.]", line)]


@pytest.mark.parametrize("rule", RULES)
def test_no_test_breaks_a_rule(rule: str) -> None:
    _, home, instead = RULES[rule]
    allowed = {TESTS / home, Path(__file__)}
    wrong = [
        f"{path.relative_to(TESTS)}:{number}"
        for path in sorted(TESTS.rglob("*.py"))
        if path not in allowed
        for number in offences(rule, path.read_text())
    ]
    assert wrong == [], instead


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("sleep", "    time.sleep(0.1)"),
        ("sleep", "await asyncio.sleep(0)"),
        ("sleep", "from time import monotonic, sleep"),
        ("sleep", "Thread(target=time.sleep, args=(1,))"),
        ("sleep", "time.sleep(1)  # sleep:"),
        ("sleep", "page.wait_for_timeout(300)"),
        ("skip", 'np = pytest.importorskip("numpy")'),
        ("skip", 'pytest.skip("no GPU")'),
        ("skip", "@pytest.mark.skipif(True, reason='x')"),
    ],
)
def test_each_way_to_break_it_is_seen(rule: str, line: str) -> None:
    assert offences(rule, f"import time\n{line}\n") == [2]
    assert offences(rule, f"{line}  # {rule}: the time itself is the subject") == []
