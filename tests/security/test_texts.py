"""Texts that want to be more: HTML on a page, SQL in an index, a path, a header, a format. Each stays text."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.server import create_app
from tests.server.conftest import client_of

MARK = "kedgexss"
TEXTS = [
    f"<script>{MARK}()</script>",
    f'"><img src=x onerror={MARK}()>',
    f"'><svg onload={MARK}()>",
    f"</title><script>{MARK}()</script>",
    f"</pre><iframe srcdoc='{MARK}'>",
    f"javascript:{MARK}()",
    "{{ 7 * 7 }} {% raw %}",
    f"<!--><script>{MARK}()//-->",
    f"\u003cscript\u003e{MARK}()\u003c/script\u003e",
    "'; DROP TABLE checkpoints; --",
    "' OR 1=1 --",
    '" UNION SELECT digest FROM chunks --',
    "%' ESCAPE '\\",
    "%_%",
    "$.a') OR json_extract(metadata, '$",
    "../../../../etc/passwd",
    "a\r\nSet-Cookie: x=y",
    "{0.__class__.__mro__}",
    "%s%n%x",
    "\x00\x1b[2J",
]


class Elements(HTMLParser):
    """What a browser would run."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("iframe", "object", "embed") or (tag == "script" and "src" not in values):
            self.live.append(tag)
        for name, value in attrs:
            is_link = name in ("href", "src", "action", "formaction", "srcdoc", "data")
            if name.startswith("on") or (is_link and (value or "").strip().lower().startswith("javascript:")):
                self.live.append(f"{tag} {name}={value}")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, kedge.CheckpointManager]]:
    with kedge.open(tmp_path_factory.mktemp("texts") / "store") as store, client_of(create_app(store)) as client:
        yield client, store


def everywhere(store: kedge.CheckpointManager, text: str, number: int) -> list[str]:
    """A job whose every text is this one: step, state, tags, metadata, and a run made of them."""
    job = f"job-{number}"
    sound = text.replace("\x00", "")
    state = {text: text, "list": [text, {text: [text]}], "bytes": text.encode(), "tuple": (text,)}
    about: dict[str, Any] = {"kind": "run", "status": "failed", "session": 1, "version": text, "pipeline": text}
    about |= {"error": text, "waiting": [{"for": "approval", "name": text, "prompt": text}]}
    return [
        store.save(job, sound, state, tags={"t": sound}, metadata={"note": text, text: text}),
        store.save(job, sound, {**state, "more": text}, metadata={"kind": "step", "path": [text], "session": 1}),
        store.save(job, "run", {"ran": [text], "traceback": text}, tags={"kind": "run"}, metadata=about),
    ]


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_on_every_page(world: tuple[TestClient, kedge.CheckpointManager], number: int) -> None:
    client, store = world
    first, second, _ = everywhere(store, TEXTS[number], number)
    job = f"job-{number}"
    paths = ["/", f"/jobs/{job}", f"/checkpoints/{first}", f"/compare?old={first}&new={second}", f"/runs/{job}"]
    for path in [*paths, "/runs", "/approvals", "/activity", "/models", "/storage"]:
        answer = client.get(path)
        assert answer.status_code in (200, 404, 422), (path, answer.status_code)
        page = Elements()
        page.feed(answer.text)
        assert page.live == [], path
        assert "set-cookie" not in answer.headers
        assert "script-src 'self'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("text", TEXTS)
def test_in_every_question(world: tuple[TestClient, kedge.CheckpointManager], text: str) -> None:
    """Found as what it is, or refused: never more than was asked for, and nothing is lost."""
    client, store = world
    store.save("watched", "s", 1, tags={"a": "b"}, metadata={"note": "plain"})
    count = len(store.events())
    questions = {
        "/api/v1/jobs": "prefix",
        "/api/v1/jobs/watched/checkpoints": "tag",
        "/api/v1/runs": "prefix",
        "/api/v1/approvals": "prefix",
        "/api/v1/audit": "cursor",
    }
    for path, name in questions.items():
        value = f"a={text}" if name == "tag" else text
        answer = client.get(path, params={name: value})
        assert answer.status_code in (200, 422), (path, answer.text[:200])
        if answer.status_code == 200:
            [rows] = [part for part in answer.json().values() if isinstance(part, list)]
            assert rows == []
    for body in ({"metadata": [f"note={text}"]}, {"metadata": [f"{text}=plain"]}):
        answer = client.get("/api/v1/jobs/watched/checkpoints", params=body)
        assert answer.status_code in (200, 422)
        assert answer.status_code == 422 or answer.json()["checkpoints"] == []
    assert client.get("/login", params={"next": text}).status_code in (200, 422)
    assert len(store.events()) == count


@pytest.mark.parametrize("text", TEXTS)
def test_as_a_name(tmp_path: Path, text: str) -> None:
    """Jobs, namespaces and tags have a grammar; none of these is in it."""
    with kedge.open(tmp_path / "store") as store:
        for save in (
            lambda: store.save(text, "s", 1),
            lambda: store.save("j", "s", 1, tags={text: "v"}),
            lambda: kedge.open(tmp_path / "store", namespace=text),
        ):
            with pytest.raises(kedge.Validation):
                save()
    assert {path.name for path in tmp_path.iterdir()} == {"store"}


@pytest.mark.parametrize(
    "address", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:x", "/%0d%0aX: 1"]
)
def test_signing_in_leads_nowhere_else(tmp_path: Path, address: str) -> None:
    from kedge.server.tokens import ACCESS, Tokens

    with kedge.open(tmp_path / "store", namespace=ACCESS) as manager:
        token = Tokens(manager).create("t", "read", ["default"])[1]
    with client_of(create_app(tmp_path / "store")) as client:
        headers = {"Origin": "http://127.0.0.1:7420"}
        answer = client.post("/login", data={"token": token, "next": address}, headers=headers, follow_redirects=False)
    place = answer.headers["location"]
    assert place.startswith("/")
    assert not place.startswith(("//", "/\\"))
    assert "evil" not in place
