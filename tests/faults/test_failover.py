"""Short form of `./dev torture failover`: the primary dies, its standby goes on, and nothing acknowledged is lost."""

from __future__ import annotations

import signal

import pytest

import kedge
from tests.parts import require
from tests.torture.failover import fail_over_under_savers, pair_of_servers

pytestmark = pytest.mark.xdist_group("failover")


def test_nothing_acknowledged_is_lost() -> None:
    require("postgres")
    with pair_of_servers() as pair:
        report = fail_over_under_savers(pair, failovers=1)
    assert report["failovers"] == 1
    assert report["acknowledged"] >= 20


def test_a_standby_that_commits_do_not_wait_for_loses_them() -> None:
    """The mutant: what the documents ask of the database is needed."""
    require("postgres")
    with pair_of_servers(is_synchronous=False) as pair:
        pair.standby.stop()
        with kedge.open(pair.url) as store:
            store.save("job", "step", 1)
        pair.primary.kill(signal.SIGKILL)
        pair.standby.start()
        pair.standby.promote()
        pair.primary = pair.standby
        with kedge.open(pair.url) as store:
            assert store.load_latest("job") is None
