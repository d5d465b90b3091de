"""Tokens made on the page."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient


@pytest.mark.parametrize(
    ("days", "says"),
    [
        ("soon", "days must be a number"),
        ("nan", "nan days"),
        ("-1", "-1 days"),
        ("0", "0 days"),
        ("1e300", "1e+300 days"),
    ],
)
def test_a_time_that_is_none_makes_no_token(client: TestClient, days: str, says: str) -> None:
    form = {"name": "anna", "scope": "read", "namespaces": "default", "days": days}
    answer = client.post("/tokens", data=form, headers={"Sec-Fetch-Site": "same-origin"})
    assert (answer.status_code, says in answer.text) == (422, True)
    assert "No tokens yet" in client.get("/tokens").text
