"""LangGraph's own suite for checkpointers, all of it: a capability that is not detected is a failure here."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.parts import require

require("module:langgraph.checkpoint.conformance")

from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.capabilities import Capability

from kedge.integrations.langgraph import KedgeSaver

# Everything the suite knows; delta_channel_history came after its first release.
CAPABILITIES = (
    "put",
    "put_writes",
    "get_tuple",
    "list",
    "delete_thread",
    "delete_for_runs",
    "copy_thread",
    "prune",
    "delta_channel_history",
)


@pytest.mark.parametrize("kind", ["directory", "memory"])
def test_every_capability(tmp_path: Path, kind: str) -> None:
    numbers = iter(range(100))

    @checkpointer_test(name=f"KedgeSaver-{kind}")
    async def make() -> AsyncIterator[KedgeSaver]:
        async with KedgeSaver("memory:" if kind == "memory" else tmp_path / str(next(numbers))) as saver:
            yield saver

    known = {capability.value for capability in Capability}
    assert known <= set(CAPABILITIES), "the suite has learned something new"
    report = asyncio.run(validate(make))
    assert report.passed_all_base()
    for name in CAPABILITIES:
        if name in known:
            result = report.results[name]
            assert (result.detected, result.failures) == (True, []), name
            assert result.tests_passed > 0
