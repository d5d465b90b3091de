"""The namespace that a page shows is the one that its address names, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import kedge
from kedge.server import create_app
from tests.server.conftest import BASE, client_of

OTHERS = f"{BASE}/jobs/train?namespace=team-b"


@pytest.fixture
def saved(store: kedge.CheckpointManager) -> str:
    return store.save("train", "one", 1)


def test_an_address_with_a_namespace_of_others_shows_no_other_one(
    store: kedge.CheckpointManager, make_token: Callable[..., str], saved: str
) -> None:
    token = make_token("anna", "write", "default")
    with client_of(create_app(store), Authorization=f"Bearer {token}", Accept="text/html") as client:
        answer = client.get("/?namespace=team-b")
        assert (answer.status_code, "train" in answer.text) == (403, False)
        assert "namespace team-b is not open to anna" in answer.text
        assert "train" in client.get("/", headers={"Referer": f"{BASE}/?namespace=team-b"}).text, "the way back"


def test_a_form_on_a_page_of_another_namespace_changes_nothing_in_this_one(
    store: kedge.CheckpointManager, make_token: Callable[..., str], saved: str
) -> None:
    """Somebody has signed in with another token in another tab: a job of the same name is not the one meant."""
    token = make_token("anna", "write", "default")
    with client_of(create_app(store), Authorization=f"Bearer {token}", Accept="text/html") as client:
        for header in ({"Referer": OTHERS}, {"HX-Current-URL": OTHERS, "HX-Request": "true"}):
            answer = client.post(f"/checkpoints/{saved}/delete", headers=header)
            assert answer.status_code == 403
            assert "namespace team-b is not open to anna" in answer.text
        part = client.get("/runs", headers={"HX-Current-URL": OTHERS, "HX-Request": "true"})
        assert part.status_code == 403
        for way_out, form in (("/namespace", {"namespace": "default"}), ("/logout", {})):
            left = client.post(way_out, data=form, headers={"Referer": OTHERS}, follow_redirects=False)
            assert left.status_code == 303
    assert store.list("train")[0].id == saved
