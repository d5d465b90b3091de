"""Who may do what: every route × every scope × own and other namespace, from the application's own table of routes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from fastapi.routing import iter_route_contexts
from starlette.routing import Mount

import kedge
from kedge.server import create_app
from kedge.server.app import check_rules
from kedge.server.auth import rule_of
from kedge.server.tokens import ACCESS, Scope, Tokens
from tests.server.conftest import BASE, client_of, listening

Make = Callable[..., str]

# What a request needs besides a token to be understood; a route that is not here gets an empty body.
BODIES: dict[tuple[str, str], Any] = {
    ("POST", "/api/checkpoints/cleanup"): {"job_id": "no-such-job"},
    ("PATCH", "/api/v1/checkpoints/{checkpoint_id}/tags"): {"tags": {"a": "b"}},
    ("PUT", "/api/v1/checkpoints/{checkpoint_id}/pin"): {"pinned": True},
    ("PUT", "/api/v1/checkpoints/{checkpoint_id}/status"): {"status": "valid"},
    ("POST", "/api/v1/jobs/{job}/copy"): {"to": "other"},
    ("POST", "/api/v1/jobs/{job}/checkpoints"): {"step": "x", "state": 1},
    ("POST", "/api/v1/retention/plan"): {"policy": {"keep_last": 1}},
    ("POST", "/api/v1/retention/apply"): {"policy": {"keep_last": 1}},
    ("PUT", "/api/v1/jobs/{job}/retention"): {"policy": None},
    ("POST", "/api/v1/runs/{key}/signals"): {"name": "go"},
    ("POST", "/api/v1/executions"): {"correlation_id": "c", "workflow_name": "w"},
    ("POST", "/api/v1/executions/{execution_id}/checkpoints"): {"checkpoint_name": "c", "agent_id": "a"},
    ("POST", "/api/v1/executions/{execution_id}/complete"): {"checkpoint": "c"},
    ("POST", "/api/v1/approvals"): {"run": "r", "name": "n", "approved": True},
    ("POST", "/api/v1/jobs/{job}/lease"): {"holder": "h"},
    ("PUT", "/api/v1/jobs/{job}/lease"): {"token": 1},
    ("POST", "/api/v1/session"): {"token": "kd_x"},
}
PARAMETERS = {"/api/v1/diff": "old=a&new=b", "/api/checkpoints": "job_id=j", "/api/v1/jobs/{job}/lease": "token=1"}
PARAMETERS |= {"/api/v1/events": "after=0"}


HARMLESS = ("/api/v1/chunks/read", "/api/v1/retention/plan", "/api/v1/session", "/login", "/logout", "/namespace")


def is_page(path: str) -> bool:
    return not path.startswith(("/api/", "/metrics", "/healthz", "/readyz", "/openapi.json"))


def every_route() -> list[tuple[str, str, Scope | None]]:
    """(method, path, rule)"""
    routes = [r for r in iter_route_contexts(create_app("memory:").routes) if not isinstance(r.original_route, Mount)]
    return [(method, str(r.path), rule_of(r)) for r in routes for method in sorted(r.methods or ())]


ROUTES = every_route()


def test_the_table_has_every_rule() -> None:
    assert {rule for *_, rule in ROUTES} == {None, Scope.READ, Scope.WRITE, Scope.ADMIN}
    assert len(ROUTES) > 50


def test_what_changes_something_needs_more_than_read() -> None:
    """Planning and reading change nothing; signing in and out, and choosing a namespace, change cookies."""
    for method, path, rule in ROUTES:
        if method not in ("GET", "HEAD") and path not in HARMLESS:
            assert rule in (Scope.WRITE, Scope.ADMIN), f"{method} {path}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One application and a token for each scope in two namespaces."""
    place = tmp_path_factory.mktemp("access") / "store"
    with kedge.open(place, namespace=ACCESS) as manager:
        made = Tokens(manager)
        texts = {
            (scope, space): made.create(f"{scope}-{space}", scope, [space])[1]
            for scope in Scope
            for space in ("own", "other")
        }
    with client_of(create_app(place, namespace="own")) as client:
        yield client, texts


@pytest.mark.parametrize(("method", "path", "rule"), ROUTES, ids=str)
def test_matrix(world: Any, method: str, path: str, rule: Scope | None) -> None:
    client, texts = world
    filled = path
    for name in ("checkpoint_id", "job", "key", "execution_id", "task_id", "kind"):
        filled = filled.replace("{" + name + "}", "nothing")
    extra = f"&{PARAMETERS[path]}" if path in PARAMETERS and (method != "PUT") and (method != "POST") else ""

    def status(text: str | None, space: str = "own") -> int:
        headers = {"Authorization": f"Bearer {text}"} if text else {}
        body = BODIES.get((method, path))
        url = f"{filled}?namespace={space}{extra}"
        with client.stream(method, url, headers=headers, json=body, follow_redirects=False) as answer:
            return int(answer.status_code)

    for scope in Scope:
        own, other = texts[scope, "own"], texts[scope, "other"]
        if rule is None:
            continue
        if not scope.includes(rule):
            assert status(own) == 403
        elif path != "/api/v1/events":  # never ends; its own test reads it
            assert status(own) not in (401, 403, 500)
        if not is_page(path):  # a page shows the namespaces of its token, whatever its address says
            assert status(other) == 403
            assert status(own, "other") == 403
            assert status(own, ACCESS) == 403
    refused = (303, 401) if is_page(path) else (401,)
    if rule is None:
        assert status(None) not in (403, 500)
    else:
        assert status(None) in refused
        assert status("kd_000000000000_" + "x" * 43) in refused
        assert status(texts[Scope.ADMIN, "own"][:-1] + "!") in refused


def test_choosing_a_namespace_of_others_is_not_allowed(world: Any) -> None:
    client, texts = world
    headers = {"Authorization": f"Bearer {texts[Scope.READ, 'own']}"}
    for space, status in (("own", 303), ("other", 403)):
        answer = client.post("/namespace", data={"namespace": space}, headers=headers, follow_redirects=False)
        assert answer.status_code == status


def test_pages_show_only_the_namespaces_of_a_token(world: Any) -> None:
    client, texts = world
    own, other = ({"Authorization": f"Bearer {texts[Scope.WRITE, space]}"} for space in ("own", "other"))
    saved = client.post("/api/v1/jobs/unseen/checkpoints?namespace=other", json={"step": "s"}, headers=other).json()
    for path in (f"/checkpoints/{saved['id']}", "/jobs/unseen"):
        assert client.get(path, headers=own).status_code == 404
        assert client.get(f"{path}?namespace=other", headers=own).status_code == 403  # as for what does not exist
    assert "unseen" not in client.get("/?namespace=other", headers=own).text


def test_a_route_without_a_rule_stops_the_application() -> None:
    app = create_app("memory:")
    router = APIRouter()

    @router.get("/forgotten")
    async def forgotten() -> None: ...

    app.include_router(router)
    with pytest.raises(TypeError, match="/forgotten"):
        check_rules(app)


def test_loopback_only_without_tokens(store: kedge.CheckpointManager) -> None:
    from fastapi.testclient import TestClient

    app = create_app(store)
    with client_of(app) as here:
        assert here.get("/api/v1/jobs").status_code == 200
        assert here.get("/api/v1/jobs", headers={"X-Forwarded-For": "10.0.0.9"}).status_code == 403
        assert here.get("/api/v1/jobs", params={"namespace": "other"}).status_code == 403
    elsewhere = TestClient(app, base_url=BASE, client=("10.0.0.9", 1))
    assert elsewhere.get("/api/v1/jobs").status_code == 403
    assert elsewhere.get("/healthz").status_code == 200


def test_the_first_token_closes_the_door(place: Path, store: kedge.CheckpointManager, make_token: Make) -> None:
    make_token("first")
    with client_of(create_app(store)) as client:
        answer = client.get("/api/v1/jobs")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")


def test_expired_and_revoked_tokens(place: Path, make_token: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.server.tokens.REMEMBERED_S", 0.0)
    good, short = make_token("good"), make_token("short", expires_days=1e-9)
    with client_of(create_app(place)) as client, kedge.open(place, namespace=ACCESS) as manager:
        assert client.get("/api/v1/jobs", headers={"Authorization": f"Bearer {short}"}).status_code == 401
        assert client.get("/api/v1/jobs", headers={"Authorization": f"Bearer {good}"}).status_code == 200
        Tokens(manager).revoke("good")
        assert client.get("/api/v1/jobs", headers={"Authorization": f"Bearer {good}"}).status_code == 401
        assert client.get("/api/v1/jobs").status_code == 401  # all are gone: closed, not open


def test_a_stream_ends_with_the_right_to_it(place: Path, make_token: Make) -> None:
    """A stream that was open when its token was revoked, or when the first token closed the door, tells no more."""
    with listening(create_app(place)) as url, kedge.open(place, namespace=ACCESS) as manager:
        for revoke in (False, True):
            headers = {"Authorization": f"Bearer {make_token('reader')}"} if revoke else {}
            with httpx.stream("GET", f"{url}/api/v1/events", headers=headers, timeout=60) as answer:
                assert answer.status_code == 200
                if revoke:
                    Tokens(manager).revoke("reader")
                else:
                    make_token("first")
                assert next(answer.iter_raw(), b"") == b""  # it ends, before it sends a sign of life


def test_a_token_is_revoked_by_its_id_before_one_that_is_named_like_it(place: Path, make_token: Make) -> None:
    meant = make_token("meant").split("_")[1]
    make_token(meant)
    with kedge.open(place, namespace=ACCESS) as manager:
        assert Tokens(manager).revoke(meant).name == "meant"
        assert [token.name for token in Tokens(manager).all() if token.is_valid] == [meant]


def test_tokens_are_kept_as_digests_only(place: Path, make_token: Make) -> None:
    text = make_token("secret")
    stored = b"".join(file.read_bytes() for file in place.rglob("*") if file.is_file())
    assert text.encode() not in stored
    assert text.split("_", 2)[2].encode() not in stored


def test_tokens_of_bad_input(place: Path, make_token: Make) -> None:
    for arguments in (("a b",), ("ok", "root"), ("ok", "read", ACCESS), ("ok", "read", "../x")):
        with pytest.raises(kedge.Validation):
            make_token(*arguments)
    make_token("ok")
    with pytest.raises(kedge.Conflict):
        make_token("ok")


def test_login_cookie(place: Path, make_token: Make) -> None:
    text = make_token("page", "write")
    ours = {"Origin": BASE, "Sec-Fetch-Site": "same-origin"}
    with client_of(create_app(place)) as client:
        assert client.post("/api/v1/session", json={"token": "kd_wrong"}, headers=ours).status_code == 401
        answer = client.post("/api/v1/session", json={"token": text}, headers=ours)
        cookie = answer.headers["set-cookie"]
        assert answer.status_code == 204
        assert cookie.startswith("kedge-session-7420=ks_")
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert client.get("/api/v1/whoami").json()["actor"] == "page"

        save: dict[str, Any] = {"url": "/api/v1/jobs/j/checkpoints", "json": {"step": "s", "state": 1}}
        assert client.post(**save, headers=ours).status_code == 201
        # Another site's page has the browser send the cookie; it cannot choose these headers.
        for foreign in ({}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
            assert client.post(**save, headers=foreign).status_code == 403
        assert client.delete("/api/v1/session", headers=ours).status_code == 204
        client.cookies.clear()
        assert client.get("/api/v1/whoami").status_code == 401


def test_pages_of_other_sites_cannot_use_an_open_service(store: kedge.CheckpointManager) -> None:
    with client_of(create_app(store)) as client:
        for foreign in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            answer = client.post("/api/v1/jobs/j/checkpoints", json={"step": "s", "state": 1}, headers=foreign)
            assert answer.status_code == 403
        # DNS rebinding: the browser believes that this is its own site
        assert client.get("/api/v1/jobs", headers={"Host": "evil.example"}).status_code == 421
    assert store.list("j") == []


def test_every_change_names_who_made_it(place: Path, make_token: Make) -> None:
    text = make_token("alice", "write")
    with client_of(create_app(place), Authorization=f"Bearer {text}") as client:
        saved = client.post("/api/v1/jobs/j/checkpoints", json={"step": "s", "state": 1}).json()["id"]
        client.put(f"/api/v1/checkpoints/{saved}/pin", json={"pinned": False})
        client.patch(f"/api/v1/checkpoints/{saved}/tags", json={"tags": {"a": "b"}})
        client.delete(f"/api/v1/checkpoints/{saved}")
        log = client.get("/api/v1/audit").json()["events"]
    assert {entry["actor"] for entry in log} == {"alice"}
    assert [entry["action"] for entry in reversed(log)] == ["save", "unpin", "tag", "delete"]


def test_a_token_for_several_namespaces_says_which(place: Path, make_token: Make) -> None:
    text = make_token("both", "write", "a", "b")
    with client_of(create_app(place), Authorization=f"Bearer {text}") as client:
        assert client.get("/api/v1/jobs").status_code == 422
        for space in ("a", "b"):
            saved = client.post(f"/api/v1/jobs/{space}/checkpoints?namespace={space}", json={"step": "s", "state": 1})
            assert saved.status_code == 201
        names = client.get("/api/v1/jobs?namespace=a").json()["jobs"]
        assert [job["name"] for job in names] == ["a"]
        crossing = saved.json()["id"]
        assert client.get(f"/api/v1/checkpoints/{crossing}?namespace=a").status_code == 404
        page = client.get("/")  # people begin with the first, and choose another on the page
        assert page.status_code == 200
        assert "<option selected>a</option>" in page.text
        client.cookies.set("kedge_namespace", "b")
        assert "<option selected>b</option>" in client.get("/").text


def test_tokens_are_managed_on_the_page_within_ones_own_namespaces(place: Path, make_token: Make) -> None:
    admin = make_token("ada", "admin", "a", "b")
    make_token("other", "admin", "a", "elsewhere")
    wish = {"name": "ci", "scope": "write", "namespaces": ["a"], "days": "30"}
    own = {"Authorization": f"Bearer {admin}"}
    with client_of(create_app(place, namespace="a")) as client:
        page = client.post("/tokens", data=wish, headers=own)
        assert page.status_code == 200
        (text,) = set(re.findall(r"kd_[0-9a-f]{12}_[\w-]{43}", page.text))
        used = {"Authorization": f"Bearer {text}"}
        assert client.get("/api/v1/jobs?namespace=a", headers=used).status_code == 200
        assert client.get("/api/v1/jobs?namespace=b", headers=used).status_code == 403
        listed = client.get("/tokens?namespace=a", headers=own)
        assert text not in listed.text
        assert "ci" in listed.text
        assert "elsewhere" not in listed.text
        for wrong, status in (({"namespaces": ["elsewhere"]}, 403), ({"days": "-1"}, 422), ({"scope": "all"}, 422)):
            refused = client.post("/tokens", data={**wish, "name": "x", **wrong}, headers=own)
            assert refused.status_code == status
        assert client.post("/tokens", data=wish, headers=own).status_code == 409  # there is one of that name
        with kedge.open(place, namespace=ACCESS) as manager:
            tokens = {token.name: token for token in Tokens(manager).all()}
            assert manager.events(limit=1, newest=True)[-1].actor == "ada"
        assert (tokens["ci"].namespaces, tokens["ci"].scope) == (("a",), Scope.WRITE)
        assert client.post("/tokens/revoke", data={"id": tokens["other"].id}, headers=own).status_code == 404
        assert client.post("/tokens/revoke", data={"id": tokens["ci"].id}, headers=own).status_code == 200
        with kedge.open(place, namespace=ACCESS) as manager:
            assert {token.name: token.is_valid for token in Tokens(manager).all()} == {
                "ada": True, "other": True, "ci": False,
            }  # fmt: skip


def test_other_sites_make_no_tokens(place: Path, make_token: Make) -> None:
    admin = make_token("ada", "admin")
    with client_of(create_app(place)) as client:
        origin = {"Origin": BASE}
        assert client.post("/login", data={"token": admin}, headers=origin, follow_redirects=False).status_code == 303
        wish = {"name": "ci", "scope": "admin", "namespaces": ["default"]}
        for foreign in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {}):
            assert client.post("/tokens", data=wish, headers=foreign).status_code == 403
        assert client.post("/tokens", data=wish, headers=origin).status_code == 200
