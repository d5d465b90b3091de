"""Spans and metrics, in a program that has set up OpenTelemetry; without it, nothing of it is imported."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

WORK = """
    import sys
    import kedge

    def fail_once(calls=[]):
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("no answer")

    def ask(**request):
        return {"model": "m", "content": "yes", "usage": {"prompt_tokens": 3, "completion_tokens": 2}}

    def session():
        with kedge.run("r", store=store, pipeline="p", progress=False) as run:
            run.step("read", lambda: 1)
            run.step("fetch", fail_once, retries=kedge.Retry(times=1, delay_s=0))
            run.map(abs, [1, 2], name="m")
            run.llm("ask", ask, model="m", messages=[])

    with kedge.open("memory:") as store:
        session()
        session()
        try:
            with kedge.run("failing", store=store, progress=False):
                raise ValueError("no luck")
        except ValueError:
            pass
"""
SETUP = """
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, reader, provider = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([reader]))
"""
REPORT = """
    import json
    names = {each.context.span_id: each.name for each in spans.get_finished_spans()}
    shown = [
        [each.name, names.get(each.parent.span_id) if each.parent else None, each.status.status_code.name,
         dict(each.attributes)]
        for each in spans.get_finished_spans()
    ]
    points = {}
    for scope in reader.get_metrics_data().resource_metrics[0].scope_metrics:
        for metric in scope.metrics:
            for point in metric.data.data_points:
                value = getattr(point, "value", None)
                words = [str(v) for v in point.attributes.values()]
                points[" ".join([metric.name, *words])] = point.count if value is None else value
    print(json.dumps([shown, points]))
"""


def run_program(folder: Path, *parts: str) -> str:
    program = folder / "program.py"
    program.write_text("\n".join(dedent(part) for part in parts))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    assert "detach" not in done.stderr
    return done.stdout


def test_runs_steps_items_and_llm_calls_are_spans_and_metrics(tmp_path: Path) -> None:
    shown: list[tuple[str, str | None, str, dict[str, Any]]]
    shown, points = json.loads(run_program(tmp_path, SETUP, WORK, REPORT))
    found = [(name, parent, status) for name, parent, status, _ in shown]
    assert ("step read", "run p", "UNSET") in found
    assert [each for each in found if each[0] == "step fetch"] == [
        ("step fetch", "run p", "ERROR"), ("step fetch", "run p", "UNSET"),
    ]  # fmt: skip
    assert found.count(("item of m", "run p", "UNSET")) == 2
    assert ("llm m", "step ask", "UNSET") in found
    assert found.count(("run p", None, "UNSET")) == 2
    assert ("run failing", None, "ERROR") in found
    about = {name: facts for name, _, _, facts in shown}
    assert about["step fetch"] == {"kedge.run": "r", "kedge.step": "fetch", "kedge.attempt": 2}
    assert about["run failing"]["kedge.status"] == "failed"
    assert about["llm m"]["gen_ai.usage.input_tokens"] == 3
    assert points["kedge.steps p ran"] == 3
    assert points["kedge.steps p failed"] == 1
    assert points["kedge.steps p reused"] == 3
    assert points["kedge.step.duration p ran"] == 3
    assert (points["kedge.items p ran"], points["kedge.items p reused"]) == (2, 2)
    assert (points["kedge.run.duration p completed"], points["kedge.run.duration  failed"]) == (2, 1)
    assert points["kedge.llm.calls m False"] == 1
    assert points["kedge.llm.tokens m False output"] == 2


def test_a_run_belongs_to_the_trace_in_which_it_was_submitted(tmp_path: Path) -> None:
    work = """
    import kedge
    from kedge.pipeline.consumer import Worker

    @kedge.pipeline
    def work(number):
        return kedge.current_run().step("square", lambda: number**2)

    with kedge.open("store") as store:
        with trace.get_tracer("program").start_as_current_span("request"):
            kedge.queue("q", store=store).submit(work, 1)
            kedge.start(work, 2, store=store).result()
        kedge.queue("q", store=store).submit(work, 3)
        Worker(store, ["q"], {"work": work}).serve(until_empty=True)
    """
    shown, _ = json.loads(run_program(tmp_path, SETUP, work, REPORT))
    parents = [(name, parent) for name, parent, *_ in shown]
    assert sorted(parents, key=repr) == [
        ("request", None), ("run work", "request"), ("run work", "request"), ("run work", None),
        ("step square", "run work"), ("step square", "run work"), ("step square", "run work"),
    ]  # fmt: skip


def test_nothing_is_imported_where_it_is_off(tmp_path: Path) -> None:
    printed = run_program(tmp_path, WORK, """print([name for name in sys.modules if "opentelemetry" in name])""")
    assert printed.strip() == "[]"


def test_what_another_thread_is_just_importing_is_not_there_yet(tmp_path: Path) -> None:
    half = """
    import sys, types
    for name in ("opentelemetry.trace", "opentelemetry.metrics"):
        sys.modules[name] = types.ModuleType(name)
    """
    assert run_program(tmp_path, half, WORK, "print('ended')") == "ended\n"
