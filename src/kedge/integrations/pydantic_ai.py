"""Pydantic AI: agents whose model requests and tool calls are steps of a run (docs/pydantic-ai.md).

    from pydantic_ai import Agent
    from kedge.integrations.pydantic_ai import KedgeDurability

    agent = Agent("openai:gpt-5", name="clerk", capabilities=[KedgeDurability()])
    with kedge.run("order-7", store="my-store"):
        agent.run_sync("hello")

A run that was stopped goes on where it was: what is finished is neither asked nor called again. Outside of a run the
agent is an ordinary one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Literal
from weakref import WeakKeyDictionary

from kedge.errors import missing_extra
from kedge.model import CheckpointLevel
from kedge.pipeline.keys import Path
from kedge.pipeline.place import Place, here
from kedge.pipeline.run import Run

try:
    from pydantic_ai.durable_exec import (
        JSON_CODEC,
        BaseDurabilityCapability,
        DurabilityEngineSpec,
        DurableOperationId,
        JournalCallableOperationBackend,
        RoleBasedOperationConfig,
    )
except ModuleNotFoundError as error:
    raise missing_extra("kedge.integrations.pydantic_ai", "pydantic-ai", error) from error

_KINDS: frozenset[Literal["function", "mcp", "dynamic"]] = frozenset({"function", "mcp", "dynamic"})
_STEPS = (CheckpointLevel.STEP, CheckpointLevel.SUBSTEP)
_counts: WeakKeyDictionary[Run, dict[Path, tuple[Place, Counter[str]]]] = WeakKeyDictionary()


class KedgeDurability(BaseDurabilityCapability[object]):
    """Give it to an agent that has a name: `Agent(…, name="clerk", capabilities=[KedgeDurability()])`.

    Its steps are numbered in the order in which they begin, so code around the agent must call it in the same order
    again. Tools run one after another. A tool that was stopped in the middle is called again.
    """

    engine_spec = DurabilityEngineSpec(
        engine_name="Kedge",
        durable_unit_noun="step",
        durable_container_noun="run",
        codec=JSON_CODEC,
        unsupported_runtime_toolset_kinds=_KINDS,
        wrapped_toolset_kinds=_KINDS,
        toolset_lifecycles={"function": "enter-always", "mcp": "enter-in-durable-unit", "dynamic": "enter-never"},
        sequential_tools_in_durable_context=True,
    )

    @property
    def in_durable_context(self) -> bool:
        return here() is not None

    def get_default_run_id(self) -> str | None:
        if (place := here()) is None:
            return None
        return f"{place.run.key}/{_numbered(place, f'{self.name} run')}"

    async def get_run_start_time(self, run_id: str) -> datetime | None:
        if here() is None:
            return None

        async def now() -> datetime:
            return datetime.now(UTC)

        began: datetime = await _step(f"{self.name} began", now)
        return began

    def get_durable_operation_backend(self) -> _Steps:
        return _Steps(
            agent_name=self.name, config=RoleBasedOperationConfig(model=None, event=None, capability=None, tool=None)
        )


class _Steps(JournalCallableOperationBackend[None]):
    async def execute(
        self,
        *,
        operation_id: DurableOperationId,
        name: str,
        body: Callable[[], Awaitable[object]],
        cache_key: tuple[object, ...],
        config: None,
    ) -> object:
        async def call() -> object:
            return await body()

        return await _step(name, call)


async def _step(name: str, body: Callable[[], Awaitable[object]]) -> Any:
    place = here()
    assert place is not None  # nosec B101 # asked before: only in a run
    return await place.run.step(_numbered(place, name), body)


def _numbered(place: Place, name: str) -> str:
    """The name of a step that may come several times, with how often it came before: in this attempt of the step
    around it, because the next attempt repeats what was done."""
    counted = _counts.setdefault(place.run, {})
    before, counts = counted.get(place.path, (place, Counter[str]()))
    if before is not place and place.level in _STEPS:
        counts = Counter()
    counted[place.path] = place, counts
    counts[name] += 1
    return f"{name} {counts[name]}"
