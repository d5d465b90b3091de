"""The query of every route: a parameter that is unknown, repeated or of another form is refused, and named."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient
from starlette.routing import Mount

import kedge
from kedge.server import create_app

OLDER = "/api/checkpoints"
ITEMS = {"checkpoint_id", "job", "key", "execution_id", "task_id", "kind"}


def every_rule() -> list[tuple[str, str, Any]]:
    """(method, path, rule) of every route but the older ones, which took any query."""
    routes = [r for r in iter_route_contexts(create_app("memory:").routes) if not isinstance(r.original_route, Mount)]
    return [
        (min(r.methods or ()), str(r.path), r.original_route.query_rule)
        for r in routes
        if not str(r.path).startswith(OLDER)
    ]


RULES = every_rule()


def refused(client: TestClient, method: str, path: str, query: str) -> str:
    """What a request with this query is told; it is refused."""
    for name in ITEMS:
        path = path.replace("{" + name + "}", "nothing")
    answer = client.request(method, f"{path}?{query}", headers={"Origin": str(client.base_url)})
    assert answer.status_code == 422, f"{method} {path}?{query}: {answer.status_code}"
    if answer.headers["content-type"].startswith("application/problem+json"):
        assert answer.json()["code"] == "invalid"
    return answer.text


@pytest.mark.parametrize(("method", "path", "rule"), RULES, ids=[f"{method} {path}" for method, path, _ in RULES])
def test_odd_queries_of_every_route(client: TestClient, method: str, path: str, rule: Any) -> None:
    assert "odd_one" in refused(client, method, path, "odd_one=1")
    for name in rule.known - rule.repeatable:
        assert name in refused(client, method, path, f"{name}=1&{name}=2")
        assert name in refused(client, method, path, f"{name}=true&{name}=true")
    for name, (_, what) in rule.forms.items():
        wrong = (
            ("yes", "1", "on", "") if what == "true or false" else ("false", "5.5", "1_000", "+5", "", "null", "%205")
        )
        for value in wrong:
            assert name in refused(client, method, path, f"{name}={value}")


def test_the_table_has_all_forms() -> None:
    assert sum(len(rule.forms) for *_, rule in RULES) >= 25
    assert {name for *_, rule in RULES for name in rule.repeatable} == {"tag", "metadata", "key", "by", "with", "id"}


def test_a_page_takes_what_its_links_pass(client: TestClient, store: kedge.CheckpointManager) -> None:
    """The fork of a run: parameters that one model describes."""
    with kedge.run("nightly", store=store) as run:
        run.step("one", lambda: 1)
    shown = client.get("/runs/nightly/fork?step=one&new_key=again&arguments=%7B%7D", headers={"Accept": "text/html"})
    assert shown.status_code == 200, shown.text
    assert "again" in shown.text


def test_older_routes_take_any_query(client: TestClient, store: kedge.CheckpointManager) -> None:
    store.save("j", "s", 1)
    assert client.get(f"{OLDER}?job_id=j&odd=1&odd=2").json()["total"] == 1


def test_keys_are_looked_for_behind_a_place(client: TestClient, store: kedge.CheckpointManager) -> None:
    for n in range(3):
        store.save("j", "s", n, idempotency_key=f"k{n}")
    answer = client.get("/api/v1/jobs/j/keys?key=k0&key=k2&after=1").json()
    assert [entry["key"] for entry in answer["found"]] == ["k2"]


def test_what_json_calls_a_whole_number_is_one(client: TestClient) -> None:
    assert client.get("/api/v1/jobs/j/checkpoints?limit=5.0&cursor=30.0").status_code == 200


def test_what_may_repeat_does(client: TestClient, store: kedge.CheckpointManager) -> None:
    store.save("j", "s", 1, tags={"a": "1", "b": "2"})
    for query, count in (("tag=a=1&tag=b=2", 1), ("tag=a=1&tag=b=3", 0)):
        answer = client.get(f"/api/v1/jobs/j/checkpoints?{query}")
        assert len(answer.json()["checkpoints"]) == count
