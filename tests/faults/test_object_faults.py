"""A real S3 server behind a proxy that loses requests and answers, says 500 and 503, and cuts answers off."""

from __future__ import annotations

import pytest

from kedge.testing.blobs_suite import pattern, put, read
from tests.servers.fault_proxy import FAULTS, fault_proxy

pytestmark = [pytest.mark.faults, pytest.mark.xdist_group("s3"), pytest.mark.requires("s3")]


def test_nothing_is_lost_and_no_conflict_is_false(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kedge.blobs.backoff import Backoff
    from kedge.blobs.objects import connect
    from kedge.blobs.retries import RetryingBlobs

    with fault_proxy(s3, rate=0.3) as (address, proxy):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        blobs = RetryingBlobs(connect("s3://kedge/faults"), Backoff(attempts=40, first_s=0.002, most_s=0.02))
        kept = []
        for seed in range(60):
            data = pattern(70_000 + seed, seed)
            (place,) = put(blobs, data)
            kept.append((place, data))
        for place, data in kept:
            assert read(blobs, place, len(data)) == data
        for (pack, _), _ in kept[::2]:
            assert blobs.remove(pack, lambda: True) or pack not in dict(blobs.packs())
        assert {pack for pack, _ in blobs.packs()} == {place[0] for place, _ in kept[1::2]}
        blobs.close()
    assert all(proxy.struck[fault] for fault in FAULTS), proxy.struck


def test_the_same_faults_without_retries_are_seen(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy does spoil what it should: without the wrapper, saves fail."""
    from kedge.blobs.objects import connect
    from kedge.errors import Unavailable

    with fault_proxy(s3, rate=0.9) as (address, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        blobs = connect("s3://kedge/unwrapped")
        with pytest.raises(Unavailable):
            for seed in range(10):
                put(blobs, pattern(1000, seed))
