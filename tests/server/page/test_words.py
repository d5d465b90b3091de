"""What the page says was done."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from fastapi.testclient import TestClient

import kedge

FREED = "The next gc frees its space."


@pytest.mark.parametrize(
    ("address", "form", "says"),
    [
        ("/jobs/two/cleanup", {"keep_last": "1"}, "1 checkpoint deleted."),
        (
            "/jobs/two/retention",
            {"do": "apply", "keep_last": "1"},
            f"1 checkpoint deleted. {FREED}",
        ),
        ("/retention", {"keep_last": "1"}, f"1 checkpoint deleted. {FREED}"),
        ("/jobs/one/copy", {"new_job": "again"}, "1 checkpoint copied; no byte is stored twice."),
        ("/storage/verify", {}, "Verification has started."),
        ("/storage/gc", {}, "Garbage collection has started."),
    ],
)
def test_what_was_done_is_said_in_numbers_that_agree(
    client: TestClient, store: kedge.CheckpointManager, address: str, form: Mapping[str, str], says: str
) -> None:
    store.save("one", "step", 1)
    for n in range(2):
        store.save("two", f"step {n}", n)
    page = client.post(address, data=form, headers={"Sec-Fetch-Site": "same-origin"})
    assert page.status_code == 200
    assert f'<p class="notice" role="status"><bdi>{says}' in page.text


def test_what_an_empty_store_holds_is_said_without_a_number_that_is_none(client: TestClient) -> None:
    page = client.get("/storage").text
    assert "nothing is stored yet" in page
    assert "in all –" not in page
