"""Rules that the tests themselves keep, so that they fail only when the code is wrong and never stop proving."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True)
class Rule:
    pattern: re.Pattern[str]
    home: str  # the file that is the place for it
    instead: str
    excuse: str = ""  # what a line says that breaks the rule with a reason; else `# name: …`
    between: tuple[float, float] | None = None  # only these numbers, as the first group of the pattern, are wrong


def _number(text: str) -> str:
    return rf"{text}(\d+(?:\.\d+)?|\.\d+)\b"


RULES = {
    # A sleep that orders threads is right until the machine is busy.
    "sleep": Rule(
        re.compile(
            r"\b(?:time|asyncio|page)\.(?:sleep|wait_for_timeout)\b|from (?:time|asyncio) import .*\bsleep\b"
            r"|\bEvent\(\)\.wait\(\d"
        ),
        "waiting.py",
        "wait for a condition with tests/waiting.py, or say with `# sleep: …` why the time itself is meant",
    ),
    # One that stands for work is over too soon where the test stands still: somebody else was to be quicker.
    "length": Rule(
        re.compile(_number(r"\b(?:time|asyncio)\.sleep\(") + r"\)"),
        "waiting.py",
        "hold it by a file or an event; a pause between two looks is shorter, what is killed sleeps for ever. "
        "Where any longer one would do as well, say `# sleep: at least …`",
        excuse=r"# sleep: at least \w",
        between=(0.051, 59.9),
    ),
    # A limit is only for what would never come: no busy machine may reach it.
    "limit": Rule(
        re.compile(
            _number(r"(?:\.(?:communicate|join|result|settimeout|wait)\(|\b(?:busy_)?timeout(?:_s)?=)(?:timeout=)?")
        ),
        "waiting.py",
        "wait for 60 s or longer, or say with `# limit: …` why it makes no difference whether it is reached",
        between=(0.001, 59.9),
    ),
    # Whoever stands still for so long has lost it, and somebody else goes on.
    "lease": Rule(
        re.compile(_number(r"\b(?:lease_s|ttl_s)=")),
        "waiting.py",
        "take it for 60 s; to end it, break it; or say with `# lease: …` why it makes no difference whether it ends",
        between=(0.001, 19.9),
    ),
    # httpx waits for five seconds, unless it is told otherwise.
    "answer": Rule(
        re.compile(
            r"\bhttpx2?\.(?:get|post|put|patch|delete|head|request|stream|(?:Async)?Client)\((?!$)(?!.*timeout=)"
        ),
        "waiting.py",
        "say timeout=60, or with `# answer: …` why not",
    ),
    # A browser shows what a click, a key or an answer brings a moment later; a look does not wait for it.
    "look": Rule(
        re.compile(
            r"\bassert .*\.(?:(?:inner_text|text_content|input_value)\(|all_(?:inner_texts|text_contents)\(\)|count\(\)"
            r"|is_(?:visible|hidden|enabled|disabled|checked|editable)\(\)|bounding_box\(\))"
        ),
        "e2e/seeing.py",
        "expect it with tests/e2e/seeing.py, or say with `# look: …` why it cannot come later",
    ),
    # The page's own policy forbids its second look: it is right only where it was true at the first.
    "eval": Rule(
        re.compile(r"\.wait_for_function\("),
        "e2e/seeing.py",
        "wait for an element or an address, or look again with wait_for of tests/waiting.py",
    ),
    # Playwright waits for thirty seconds, its expectations for five, unless they are told otherwise.
    "patience": Rule(
        re.compile(r"browser\.new_\w+\(|import .*\bexpect\b"),
        "e2e/seeing.py",
        "use `visitor` and `sees` of tests/e2e/seeing.py, or say with `# patience: …` why not",
    ),
    # How long something takes is measured by benchmarks, and compared there.
    "clock": Rule(
        re.compile(
            r"\b(?:process_time|getrusage)\b|raises\([^)]*TimeoutExpired"
            r"|assert .*\b(?:monotonic|perf_counter|time\.time)\(\)"
        ),
        "waiting.py",
        "prove it by what happens, or say with `# clock: …` why no machine is too slow or too fast for it",
    ),
    # Somebody else may have it a moment later.
    "port": Rule(
        re.compile(r"\.bind\(\(\"[^\"]*\", 0\)\)|create_server\(.*, 0\)\) as free\b"),
        "servers/ports.py",
        "let who listens choose its port and say it, or use tests/servers/ports.py, "
        "or say with `# port: …` what happens if it is taken",
    ),
    # What is listed may be gone when it is looked at: whoever waits for a removal looks while it happens.
    "gone": Rule(
        re.compile(
            r"\bwait_for\w*\(lambda: .*\b(?:glob|rglob|iterdir|listdir|scandir)\(.*\bstat\(|"
            r"\bwait_for\w*\(lambda: .*\bstat\(.*\b(?:glob|rglob|iterdir|listdir|scandir)\("
        ),
        "waiting.py",
        "count with `bytes_below` of tests/waiting.py",
    ),
    # A skip of its own would not fail in CI, where KEDGE_REQUIRE=all wants every part.
    "skip": Rule(
        re.compile(r"\bimportorskip\b|\bpytest\.skip\(|\bmark\.skip(?:if)?\b"),
        "parts.py",
        "ask for it with `require` or `library` of tests/parts.py, or say with `# skip: …` why CI may skip it too",
    ),
}


def offences(name: str, text: str) -> list[int]:
    """Lines that break the rule. Programs inside of strings keep to it like the tests that start them."""
    rule = RULES[name]
    excuse = re.compile(rule.excuse or rf"# {name}: [\w.]")

    def is_wrong(line: str) -> bool:
        found = list(rule.pattern.finditer(line))
        if rule.between is not None:
            least, most = rule.between
            found = [match for match in found if least <= float(match[1]) <= most]
        return bool(found) and not excuse.search(line)

    return [number for number, line in enumerate(text.splitlines(), 1) if is_wrong(line)]


@pytest.mark.parametrize("rule", RULES)
def test_no_test_breaks_a_rule(rule: str) -> None:
    allowed = {TESTS / RULES[rule].home, Path(__file__)}
    wrong = [
        f"{path.relative_to(TESTS)}:{number}"
        for path in sorted(TESTS.rglob("*.py"))
        if path not in allowed
        for number in offences(rule, path.read_text())
    ]
    assert wrong == [], RULES[rule].instead


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("gone", "wait_for(lambda: sum(f.stat().st_size for f in packs.glob('*')) < 9, 'they stay')"),
        ("sleep", "    time.sleep(0.1)"),
        ("sleep", "await asyncio.sleep(0)"),
        ("sleep", "from time import monotonic, sleep"),
        ("sleep", "Thread(target=time.sleep, args=(1,))"),
        ("sleep", "time.sleep(1)  # sleep:"),
        ("sleep", "page.wait_for_timeout(300)"),
        ("sleep", "threading.Event().wait(0.1)"),
        ("length", "time.sleep(0.2)  # sleep: the work"),
        ("lease", 'with store.lease("job", ttl_s=0.5):'),
        ("lease", "Worker(store, lease_s=1)"),
        ("answer", "with httpx2.Client() as client:"),
        ("limit", "process.communicate(timeout=5)"),
        ("limit", "assert done.wait(0.5)"),
        ("limit", "httpx.get(url, timeout=30)"),
        ("limit", "heard.settimeout(5)"),
        ("limit", "subprocess.run(command, timeout=10, check=True)"),
        ("answer", "httpx.get(url)"),
        ("look", 'assert page.locator(".empty").count() == 1, where'),
        ("look", 'assert page.inner_text("#chosen") == "2 chosen"'),
        ("look", 'assert not page.locator("#cleanup").is_visible()'),
        ("eval", "page.wait_for_function(\"location.search === ''\")"),
        ("patience", "context = browser.new_context(base_url=address)"),
        ("patience", "from playwright.sync_api import expect"),
        ("clock", "assert time.monotonic() - start < 2"),
        ("clock", "with pytest.raises(subprocess.TimeoutExpired):"),
        ("port", 'free.bind(("127.0.0.1", 0))'),
        ("skip", 'np = pytest.importorskip("numpy")'),
        ("skip", 'pytest.skip("no GPU")'),
        ("skip", "@pytest.mark.skipif(True, reason='x')"),
    ],
)
def test_each_way_to_break_it_is_seen(rule: str, line: str) -> None:
    assert offences(rule, f"import time\n{line}\n") == [2]
    excuse = "sleep: at least this" if rule == "length" else f"{rule}: the time itself is the subject"
    assert offences(rule, f"{line}  # {excuse}") == []


def test_what_is_long_or_short_enough_breaks_no_rule() -> None:
    for line in ("time.sleep(0.02)", "time.sleep(600)", "asyncio.sleep(0)"):
        assert offences("length", line) == []
    for line in ("process.communicate(timeout=60)", "handle.result(0)", "thread.join()", "timeout_s=600"):
        assert offences("limit", line) == []
    for line in ('assert text.count("a") == 1', 'sees(page.locator("#a")).to_be_visible()'):
        assert offences("look", line) == []
    assert offences("answer", 'httpx.get(f"{url}/jobs", timeout=60)') == []
