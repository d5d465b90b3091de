"""Old runs as runs of Kedge: `kedge.run` under the same key continues after what is imported here.

An older system recorded which stages were done, not what they were given. So an imported result stands for its step
whatever the inputs, as long as the step declares no version (`pipeline.keys.imported_tag`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from kedge.llm.cache import JOB as LLM_JOB
from kedge.llm.calls import imported_request
from kedge.llm.pricing import Tokens, tokens_of
from kedge.model import CheckpointLevel, RunStatus, number_of
from kedge.pipeline.keys import digest_of, imported_tag, map_key

from .common import Document, Draft, clean, digest_of_document, legacy, name_of, step_of

MOST_RUN_KEY = 122  # leaves room for the inbox of a run


def run_key(text: object, prefix: str) -> str:
    return name_of(text, most=MOST_RUN_KEY, prefix=prefix)


@dataclass(frozen=True, slots=True)
class OldRun:
    """A run of an older system as a file of it tells; makes the drafts of what that says."""

    form: str
    source: str
    job: str
    session: int = 1

    def status(
        self,
        status: RunStatus,
        document: object,
        *,
        id: str | None = None,
        created_us: int | None,
        done: int,
        total: int | None = None,
        error: str = "",
        facts: Mapping[str, object] | None = None,
    ) -> Draft:
        """The record that makes a job a run; its state is the old document."""
        metadata: dict[str, object] = {
            "kind": "run", "status": str(status), "session": max(1, self.session), "version": "", "pipeline": None,
            "inbox": 0, "ran": 0, "reused": 0, "waiting": [],
            "progress": {"done": done, "total": None if total is None else max(total, done)},
            "imported": True, "legacy": legacy(self.form, **(facts or {})),
        }  # fmt: skip
        if error:
            metadata["error"] = clean(error)
        return self._draft(
            f"run {status}",
            document,
            key=f"run:{digest_of_document(document)}",
            id=id,
            created_us=created_us,
            level=CheckpointLevel.PIPELINE,
            tags={"kind": "run"},
            metadata=metadata,
        )

    def step(
        self,
        name: str,
        result: object,
        *,
        record: object = None,
        created_us: int | None,
        attempts: int = 1,
        seconds: object = None,
        error: str | None = None,
        key: str = "",
        facts: Mapping[str, object] | None = None,
    ) -> Draft:
        """A finished stage as a step of the run, or, with `error`, a failed attempt at it."""
        path, metadata = self._about("step" if error is None else "attempt", name, facts)
        if error is None:
            is_number = isinstance(seconds, int | float) and seconds - seconds == 0
            metadata |= {"attempts": attempts, "seconds": seconds if is_number else None, "version": "/", "inputs": {}}
        else:
            metadata |= {"attempt": attempts, "error": clean(error) or "it failed"}
        state = {"result": result, "record": record} if error is None else {"traceback": "", "record": record}
        return self._draft(
            path[0],
            state,
            key=f"step:{key or digest_of_document([path, state, error])}",
            created_us=created_us,
            level=CheckpointLevel.STAGE,
            tags={"imported": imported_tag(path)},
            metadata=metadata,
        )

    def items(
        self,
        name: str,
        items: Mapping[Any, object],
        failed: Mapping[Any, str],
        *,
        created_us: int | None,
        facts: Mapping[str, object] | None = None,
    ) -> Draft:
        """Finished items (key → result) of `run.map(…, name=name, key=…)`, and those that failed (key → error)."""
        path, metadata = self._about("items", name, facts)
        keys = b"".join(digest_of(key, "the key of an item")[:16] for key in items)
        state: dict[str, object] = {"keys": keys, "results": list(items.values())}
        metadata["items"] = len(items)
        if failed:
            metadata["failed"] = len(failed)
            state["failed"] = [
                {"key": clean(key), "error": clean(error), "attempts": 1, "traceback": ""}
                for key, error in failed.items()
            ]
        return self._draft(
            path[0],
            state,
            key=f"items:{digest_of_document([path, keys.hex(), list(failed)])}",
            created_us=created_us,
            level=CheckpointLevel.SUBSTEP,
            tags={"map": map_key(path, "/")},
            metadata=metadata,
        )

    def _draft(self, step: str, state: object, **fields: Any) -> Draft:
        return Draft(self.form, self.source, self.job, step, state, **fields)

    def _about(self, kind: str, name: str, facts: Mapping[str, object] | None) -> tuple[tuple[str], dict[str, object]]:
        path = (step_of(name),)
        about = {"kind": kind, "path": list(path), "session": max(1, self.session)}
        return path, about | {"legacy": legacy(self.form, **(facts or {}))}

    def answer(self, stage: str, entry: Document, created_us: int | None) -> Draft | None:
        """An LLM response, for `run.llm` in the imported run: found by stage and prompt, as the old run found it."""
        if not isinstance(entry.get("prompt"), str):
            return None
        request = imported_request(self.job, step_of(stage), entry["prompt"])
        model = clean(entry.get("model"), 200) or "unknown"
        about: dict[str, object] = {"kind": "llm", "model": model, "url": self.job, "sample": 0}
        if (tokens := _tokens(entry)) is not None:
            about["tokens"] = tokens.to_json()
        cost = entry.get("cost", entry.get("cost_usd"))
        if isinstance(cost, int | float) and not isinstance(cost, bool) and 0 <= cost < 1e9:
            about["cost"] = format(Decimal(str(cost)), "f")
        return Draft(
            self.form,
            self.source,
            LLM_JOB,
            model,
            {
                "request": json.dumps(request.document()),
                "answer": {"result": entry.get("response", entry)},
                "record": entry,
            },
            key=request.key,
            created_us=created_us,
            metadata={**about, "legacy": legacy(self.form, job=self.job, stage=stage)},
            found_by=request.key,
        )


def _tokens(entry: Document) -> Tokens | None:
    """What an entry says of its tokens: in a vendor's form, or as the cost files of artemis have it."""
    if isinstance(entry.get("tokens_input"), int):
        return Tokens(number_of(entry["tokens_input"]), number_of(entry.get("tokens_output")))
    return tokens_of({"usage": entry.get("usage") or entry.get("tokens")})
