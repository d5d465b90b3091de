"""Flows of CrewAI by its documented interface. The package pins an old SDK of OpenAI and brings 140 others, so that it
cannot be installed beside the rest: a stand-in has the two classes that Kedge uses."""

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

import kedge


class FlowPersistence(BaseModel, ABC):
    """As in crewai 1.15."""

    persistence_type: str = "base"

    @abstractmethod
    def init_db(self) -> None: ...

    @abstractmethod
    def save_state(self, flow_uuid: str, method_name: str, state_data: Any) -> None: ...

    @abstractmethod
    def load_state(self, flow_uuid: str) -> dict[str, Any] | None: ...


@dataclass
class PendingFeedbackContext:
    flow_id: str
    method_name: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> "PendingFeedbackContext":
        return cls(**document)


@pytest.fixture
def crewai(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`kedge.integrations.crewai`, on the stand-in."""
    names = ("crewai", "crewai.flow", "crewai.flow.persistence", "crewai.flow.async_feedback")
    modules = {name: ModuleType(name) for name in (*names, f"{names[2]}.base", f"{names[3]}.types")}
    modules[f"{names[2]}.base"].FlowPersistence = FlowPersistence  # type: ignore[attr-defined]
    modules[f"{names[3]}.types"].PendingFeedbackContext = PendingFeedbackContext  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module("kedge.integrations.crewai")
    del sys.modules["kedge.integrations.crewai"]


class Report(BaseModel):
    id: str = "r"
    pages: int = 0


def test_an_older_crewai_is_named(crewai: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of before 1.15, which pip chooses beside a newer SDK of OpenAI."""
    monkeypatch.setattr(sys.modules["crewai.flow.persistence.base"], "FlowPersistence", type("Older", (ABC,), {}))
    monkeypatch.delitem(sys.modules, "kedge.integrations.crewai")
    with pytest.raises(ImportError, match="needs a newer crewai"):
        importlib.import_module("kedge.integrations.crewai")
    sys.modules["kedge.integrations.crewai"] = crewai


def test_the_state_after_each_method_is_a_checkpoint(crewai: Any, tmp_path: Path) -> None:
    persistence = crewai.KedgeFlowPersistence(tmp_path / "store")
    persistence.init_db()
    assert persistence.load_state("a flow") is None
    persistence.save_state("a flow", "draft", Report(pages=1))
    persistence.save_state("a flow", "revise", {"id": "r", "pages": 2})
    persistence.close()
    again = crewai.KedgeFlowPersistence.model_validate({"store": str(tmp_path / "store")})  # as CrewAI does
    assert again.load_state("a flow") == {"id": "r", "pages": 2}
    again.close()
    with kedge.open(tmp_path / "store") as store:
        assert [checkpoint.step for checkpoint in store.list("flow:a+20flow")] == ["draft", "revise"]


def test_a_flow_that_waits_for_feedback(crewai: Any, tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        persistence = crewai.KedgeFlowPersistence(store)
        assert persistence.load_pending_feedback("f") is None
        context = PendingFeedbackContext("f", "review")
        persistence.save_pending_feedback("f", context, Report(pages=3))
        persistence.save_state("f", "review", Report(pages=4))
        assert persistence.load_pending_feedback("f") == ({"id": "r", "pages": 4}, context)
        for _ in range(2):
            persistence.clear_pending_feedback("f")
        assert persistence.load_pending_feedback("f") is None
        assert persistence.load_state("f") == {"id": "r", "pages": 4}
        persistence.close()
        assert len(store.list("flow:f")) == 3, "the store of the caller stays open; clearing twice is clearing once"
