"""artemis: the files beside its cards: what models cost, and what its state machine watched."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from kedge.llm.bills import Bill, Charge
from kedge.llm.pricing import Tokens
from kedge.model import CheckpointLevel
from kedge.pipeline.history import CALLS

from .common import Document, Draft, clean, digest_of_document, legacy, microseconds, number, step_of
from .runs import run_key

FORM = "artemis"
_MACHINE = ":state-machine"  # ends the name of a job beside that of the card: it holds no results
_CALL = {"model", "tokens_input", "tokens_output", "cost", "stage", "card_id"}


def is_costs(document: object) -> bool:
    return (
        isinstance(document, list)
        and bool(document)
        and all(isinstance(e, dict) and e.keys() >= _CALL for e in document)
    )


def is_machine(document: object) -> bool:
    return isinstance(document, dict) and {"card_id", "state", "stages", "health_status"} <= document.keys()


def call(entry: Document, source: str, prefix: str) -> Draft:
    """A paid call, in the books of the store: `kedge llm costs` counts it to the card's run and stage."""
    run, model, stage = (
        run_key(entry["card_id"], prefix),
        clean(entry["model"], 200) or "unknown",
        clean(entry["stage"]),
    )
    cost = entry["cost"]
    is_price = isinstance(cost, int | float) and not isinstance(cost, bool) and 0 <= cost < 1e9
    tokens = Tokens(number(entry["tokens_input"]), number(entry["tokens_output"]))
    bill = Bill().add(Charge(model, tokens, Decimal(str(cost)) if is_price else None, False, run, stage))
    key = digest_of_document(entry)
    return Draft(
        FORM,
        source,
        CALLS,
        model,
        {},
        key=key,
        created_us=microseconds(entry.get("timestamp")),
        level=CheckpointLevel.SUBSTEP,
        tags={"run": run},
        metadata={
            "model": model, "run": run, "step": stage, **bill.to_json(),
            "legacy": legacy(FORM, kind="call", provider=entry.get("provider"), purpose=entry.get("purpose")),
        },
        found_by=f"import:{key}",
    )  # fmt: skip


def machine(document: Document, source: str, prefix: str) -> Draft:
    """What the state machine had seen, beside the card: a stage that it saw completed has its result there."""
    at: Any = document.get("timestamp")
    return Draft(
        FORM,
        source,
        run_key(document["card_id"], prefix)[:108] + _MACHINE,
        step_of(document["state"], "state"),
        document,
        key=digest_of_document(document),
        created_us=microseconds(at),
        metadata={"legacy": legacy(FORM, kind="machine", job=document["card_id"], time=at)},
    )
