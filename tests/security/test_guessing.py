"""Who guesses tokens and sessions learns nothing from what the service answers, nor from how it compares."""

from __future__ import annotations

import hmac
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.server import create_app
from kedge.server.tokens import ACCESS, Tokens, digest_of
from tests.server.conftest import client_of

JOBS = "/api/v1/jobs"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def tokens(place: Path) -> dict[str, str]:
    with kedge.open(place, namespace=ACCESS) as manager:
        made = Tokens(manager)
        texts = {name: made.create(name, "read", ["default"])[1] for name in ("valid", "other", "revoked")}
        made.revoke("revoked")
        return texts


@pytest.fixture
def client(place: Path, tokens: dict[str, str]) -> Iterator[TestClient]:
    with client_of(create_app(place)) as client:
        yield client


def guesses(tokens: dict[str, str]) -> dict[str, str]:
    head, token_id, secret = re.fullmatch(r"(kd)_([0-9a-f]+)_(.+)", tokens["valid"]).groups()  # type: ignore[union-attr]
    _, _, other = tokens["other"].split("_", 2)
    last = "A" if secret[-1] != "A" else "B"
    return {
        "the first character is wrong": f"{head}_{token_id}_{'A' if secret[0] != 'A' else 'B'}{secret[1:]}",
        "the last character is wrong": f"{head}_{token_id}_{secret[:-1]}{last}",
        "one character is missing": f"{head}_{token_id}_{secret[:-1]}",
        "one character too many": f"{head}_{token_id}_{secret}A",
        "the secret of another token": f"{head}_{token_id}_{other}",
        "no such ID": f"{head}_{'0' * len(token_id)}_{secret}",
        "no secret": f"{head}_{token_id}_",
        "revoked": tokens["revoked"],
        "in another case": tokens["valid"].swapcase(),
        "a digest of it": digest_of(tokens["valid"]),
        "with a space": tokens["valid"] + " x",
        "with a NUL": tokens["valid"] + "\0",
    }


def test_every_wrong_guess_has_the_same_answer(client: TestClient, tokens: dict[str, str]) -> None:
    answers = set()
    for guess in guesses(tokens).values():
        answer = client.get(JOBS, headers={"Authorization": f"Bearer {guess}"})
        told = {name: value for name, value in answer.json().items() if name not in ("request_id", "instance")}
        answers.add((answer.status_code, str(told), answer.headers.get("www-authenticate")))
        assert guess not in answer.text
    assert len(answers) == 1
    assert answers.pop()[0] == 401
    assert client.get(JOBS, headers={"Authorization": f"Bearer {tokens['valid']}"}).status_code == 200


def test_digests_are_compared_in_constant_time(place: Path, tokens: dict[str, str]) -> None:
    """Whole digests by `hmac.compare_digest`, also where there is no such token."""
    compared: list[tuple[str, str]] = []
    real = hmac.compare_digest

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return real(one, other)

    with pytest.MonkeyPatch.context() as patch, kedge.open(place, namespace=ACCESS) as manager:
        patch.setattr("kedge.server.tokens.hmac.compare_digest", compare)
        found = Tokens(manager)
        for name in ("the first character is wrong", "the last character is wrong", "no such ID"):
            compared.clear()
            assert found.find(guesses(tokens)[name]) is None
            assert len(compared) == 1
            assert tokens["valid"] not in compared[0]


def test_a_secret_cannot_be_tried_out(tokens: dict[str, str]) -> None:
    """256 bits each, and none has anything in common with another."""
    secrets = [text.split("_", 2)[2] for text in tokens.values()]
    assert all(len(secret) * math.log2(64) >= 256 for secret in secrets)
    assert len({secret[:8] for secret in secrets}) == len(secrets)
