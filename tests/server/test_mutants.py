"""A test that cannot fail is a bug: each safeguard of the service, taken out, is noticed by the test named with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from fastapi.testclient import TestClient

import kedge.index.sqlite.writes
import kedge.server.auth
import kedge.server.batches
import kedge.server.limits
import kedge.server.query
import kedge.server.route
import kedge.server.routes.executions
import kedge.server.routes.older
import kedge.server.runner
import kedge.server.tokens
import kedge.server.uploads
import kedge.store.request
from kedge.errors import Conflict
from kedge.server import create_app
from kedge.server.auth import Needs
from kedge.server.limits import Body
from kedge.server.tokens import Scope
from tests.server import test_access, test_api, test_direct_routes, test_older_routes, test_process, test_query
from tests.server.conftest import client_of
from tests.server.test_access import world  # noqa: F401 - a fixture
from tests.server.test_older_routes import Runner

pytestmark = pytest.mark.mutant

Patch = Callable[[], AbstractContextManager[Any]]


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.fixture
def client(store: kedge.CheckpointManager, runner: Runner) -> Iterator[TestClient]:
    """One that suits all of the tests below."""
    with client_of(create_app(store, runner)) as client:
        client.get("/api/v1/jobs")
        yield client


@contextmanager
def _no_scope() -> Iterator[None]:
    with (
        mock.patch("kedge.server.auth.refuse_narrow_scope", return_value=None),
        mock.patch("kedge.server.gate.refuse_narrow_scope", return_value=None),
    ):
        yield


def _any_namespace() -> Any:
    return mock.patch("kedge.server.auth._namespace", lambda caller, wanted, default: wanted or default)


@contextmanager
def _no_rule_on_direct_routes() -> Iterator[None]:
    route = kedge.server.route.DirectRoute
    real = route._arguments

    async def arguments(self: Any, request: Any) -> Any:
        with mock.patch.object(self, "_needs", Needs(Scope.READ)):
            return await real(self, request)

    with (
        mock.patch.object(route, "_arguments", arguments),
        mock.patch("kedge.server.gate.refuse_narrow_scope", return_value=None),
    ):
        yield


def _no_key() -> Any:
    def parse(*args: Any, idempotency_key: str | None = None, **options: Any) -> Any:
        return kedge.store.request.parse_request(*args, **options)

    return mock.patch("kedge.server.uploads.parse_request", parse)


def _runner_twice() -> Any:
    real = kedge.server.runner.resume

    async def resume(*args: Any) -> None:
        await real(*args)
        await real(*args)

    return mock.patch("kedge.server.routes.older.resume", resume)


def _decided_again() -> Any:
    real = kedge.server.routes.executions.decide

    def decide(*args: Any, **options: Any) -> None:
        try:
            real(*args, **options)
        except Conflict:
            return

    return mock.patch("kedge.server.routes.executions.decide", decide)


def _no_events() -> Any:
    return mock.patch.object(kedge.index.sqlite.writes.Writes, "event", return_value=None)


def _nobody_named() -> Any:
    real = kedge.CheckpointManager.acting_as
    return mock.patch.object(kedge.CheckpointManager, "acting_as", lambda self, _: real(self, self.actor))


def _any_size() -> Any:
    async def receive(self: Body) -> Any:
        return await self._receive()

    return mock.patch.multiple(Body, __call__=receive, open=lambda *_: None)


def _any_json() -> Any:
    real = kedge.server.uploads.receive

    async def receive(request: Any, limits: Any) -> Any:
        return await real(request, kedge.server.limits.Limits())

    return mock.patch("kedge.server.routes.saves.receive", receive)


def _any_host() -> Any:
    real = kedge.server.limits.Edge.__init__

    def init(self: Any, app: Any, service: Any, hosts: Any, direct: Any) -> None:
        real(self, app, service, (), direct)

    return mock.patch.object(kedge.server.limits.Edge, "__init__", init)


def _any_site() -> Any:
    return mock.patch("kedge.server.auth.refuse_other_sites", return_value=None)


def _from_anywhere() -> Any:
    return mock.patch("kedge.server.auth._is_local", return_value=True)


def _valid_for_ever() -> Any:
    return mock.patch.object(kedge.server.tokens.Token, "is_valid", True)


def _first_answer_for_all() -> Any:
    """Who is served together gets one answer."""
    real = kedge.server.batches._deliver

    def deliver(answers: Any) -> None:
        real([(answer, answers[0][1]) for answer, _ in answers])

    return mock.patch("kedge.server.batches._deliver", deliver)


NOTICED: dict[str, tuple[Patch, Callable[..., None]]] = {
    "idempotency key ignored": (_no_key, test_direct_routes.test_keys_and_leases),
    "scope not checked": (_no_scope, test_direct_routes.test_rules_hold),
    "direct route without its rule": (_no_rule_on_direct_routes, test_direct_routes.test_rules_hold),
    "any namespace": (_any_namespace, test_access.test_loopback_only_without_tokens),
    "runner called twice": (_runner_twice, test_older_routes.test_restore_and_resume_calls_the_runner_once),
    "approvals decided twice": (_decided_again, test_api.test_approvals_are_decided_once),
    "audit entry not written": (_no_events, test_access.test_every_change_names_who_made_it),
    "audit entry without who": (_nobody_named, test_access.test_every_change_names_who_made_it),
    "body limit off": (_any_size, test_api.test_limits_of_size),
    "limit of JSON off": (_any_json, test_api.test_limits_of_size),
    "hosts not checked": (_any_host, test_access.test_pages_of_other_sites_cannot_use_an_open_service),
    "other sites not refused": (_any_site, test_access.test_login_cookie),
    "anybody without tokens": (_from_anywhere, test_access.test_loopback_only_without_tokens),
    "tokens never expire": (_valid_for_ever, test_access.test_expired_and_revoked_tokens),
    "one answer for all": (
        _first_answer_for_all,
        test_direct_routes.test_many_savers_share_commits_and_not_their_mistakes,
    ),
}


@pytest.mark.parametrize("mutant", NOTICED)
def test_noticed(mutant: str, request: pytest.FixtureRequest) -> None:
    patch, test = NOTICED[mutant]
    with patch():
        given = {name: request.getfixturevalue(name) for name in inspect.signature(test).parameters}
        with pytest.raises((AssertionError, kedge.CheckpointError)):
            test(**given)


def test_scope_of_a_route_is_noticed_by_the_matrix(request: pytest.FixtureRequest) -> None:
    with _no_scope(), pytest.raises(AssertionError):
        test_access.test_matrix(
            request.getfixturevalue("world"), "DELETE", "/api/v1/checkpoints/{checkpoint_id}", Scope.WRITE
        )


def test_a_query_that_is_not_checked_is_noticed(client: TestClient) -> None:
    unchecked = mock.patch.object(kedge.server.query.QueryRule, "check", return_value=None)
    method, path, rule = next(row for row in test_query.RULES if row[1] == "/api/v1/gc")
    with unchecked, pytest.raises(AssertionError):
        test_query.test_odd_queries_of_every_route(client, method, path, rule)


def test_a_stop_without_drain_is_noticed(tmp_path: Path) -> None:
    """The stream that was open is cut off instead of ended."""
    at_once = "import os, signal\nfrom kedge.server import process\n"
    at_once += "process._drain_on_signal = lambda *_, **__: signal.signal(signal.SIGTERM, lambda *_: os._exit(0))"
    with pytest.raises(httpx.RemoteProtocolError):
        test_process.stop_under_load(tmp_path / "store", before=at_once)
