"""What every test can ask of the machine.

A test names the parts it needs, `@pytest.mark.requires("root", "strace")`, or calls `tests.parts.require`; a Python
module is asked for as "module:torch", or with `library("torch")` where it is used. `tests/parts.py` says what happens
when a part is missing.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.parts import require

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster


def pytest_configure(config: pytest.Config) -> None:
    """What a script starts in the background ignores Ctrl-C, and so would all that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups of tests that share a server stay in one process: xdist 3.8 names them where pytest 9.2 looks no more."""
    if not getattr(config.option, "loadgroup", False):
        return
    from _pytest.nodeid import coerce_node_id

    for item in items:
        groups = sorted({str(mark.args[0]) for mark in item.iter_markers("xdist_group")})
        if groups and "@" not in item.nodeid.rpartition("]")[2]:
            item._id = coerce_node_id(f"{item.nodeid}@{'_'.join(groups)}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What collecting has made stays until the end: no collection of garbage looks at its million objects again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("requires"):
        require(*marker.args)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an S3 server. Ask for it in tests of xdist_group("s3"), so that one is enough."""
    require("s3")
    from tests.servers.s3 import environment, s3_server

    with s3_server(tmp_path_factory.mktemp("s3")) as address, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(address).items():
            patch.setenv(name, value)
        yield address


@pytest.fixture(scope="session")
def postgres() -> Iterator["Cluster"]:
    """A PostgreSQL server. Ask for it in tests of xdist_group("postgres"), so that one is enough."""
    require("postgres")
    from tests.servers.postgres import postgres_cluster

    with postgres_cluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _no_store_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test must never open the store of whoever runs it."""
    for name in [name for name in os.environ if name.startswith("KEDGE_")]:
        if name not in {"KEDGE_REQUIRE", "KEDGE_HYPOTHESIS_PROFILE"}:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store does some seconds later would fall into slow tests. Those about it say when.

    What it does when it is closed, for a moment, it does to the end.
    """
    monkeypatch.setattr("kedge.store.backlog.AFTER_S", 120.0)
    monkeypatch.setattr("kedge.store.backlog.CLOSING_S", 120.0)
    monkeypatch.setattr("kedge.care.upkeep.FINISH_WITHIN_S", 120.0)
    if "kedge.llm.bills" in sys.modules:
        monkeypatch.setattr("kedge.llm.bills.WRITE_EVERY_S", 120.0)


# --- hypothesis ---
# No deadline anywhere: a sync on a busy disk takes as long as it takes.

_slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("dev", max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=_slow)
settings.register_profile("ci", settings.get_profile("dev"), max_examples=150, print_blob=True)
settings.register_profile(
    "torture",
    settings.get_profile("dev"),
    max_examples=5_000,
    stateful_step_count=100,
    phases=[Phase.reuse, Phase.generate, Phase.target, Phase.shrink],
    print_blob=True,
)
settings.load_profile(os.environ.get("KEDGE_HYPOTHESIS_PROFILE", "dev"))
