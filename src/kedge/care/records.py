"""Jobs that Kedge itself needs later: runs, executions, messages to them, queues, and the records of LLM calls.

A policy for all jobs skips them: without its records a run would repeat finished steps, and LLM calls would be paid
again. A policy that names one of these jobs applies to it.
"""

from __future__ import annotations

from kedge.model import INBOX_SUFFIX, QUEUE_PREFIX
from kedge.ports import Catalogue, Selection

_RUN_STATUS = {"kind": ["run"]}  # the tag of a run's status records
_LLM = {
    "llm:cache": "LLM responses: a call without its response is made and paid again",
    "llm:calls": "the costs of LLM calls: they would be missing in every bill",
    "llm:flights": "LLM calls in flight: they would be made and paid again",
}


def needed_for(catalogue: Catalogue, job: str) -> str:
    """Return what Kedge needs this job for, and what its loss would mean; "" for a user's own job."""
    if job in _LLM:
        return _LLM[job]
    if job.endswith(INBOX_SUFFIX):
        return "messages to a run: decided approvals would be asked for again"
    if job.startswith(QUEUE_PREFIX):
        return "a queue: what was submitted would be lost"
    records = catalogue.list(job, Selection(tags=_RUN_STATUS, limit=1))
    if records and records[-1].metadata.get("kind") == "run":
        return "a run: finished steps would run again when it is resumed"
    newest = catalogue.list(job, Selection(limit=1))
    if newest and newest[-1].metadata.get("kind") == "execution":
        return "an execution of a workflow: its history would be lost"
    return ""
