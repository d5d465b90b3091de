"""Tokens: who may use the service, for what, where, and until when.

They are checkpoints of the job `tokens` in a namespace of their own that the service never serves, so that every worker
and every host on the store knows them, and the log of changes tells who made and revoked them. Of a token only the
SHA-256 is kept; it is shown once, when it is made.

    kd_<12 hex: its ID>_<43 characters: 256 random bits>
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from kedge.errors import Conflict, NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, parse_choice, parse_name

ACCESS = "kedge:access"  # the namespace
JOB = "tokens"
REMEMBERED_S = 1.0  # so long a revoked token may still be taken by a worker
_REVOKED = "revoked"
_TOKEN = re.compile(r"kd_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")
_LONGEST_DAYS = 3660


class Scope(StrEnum):
    """What a token is good for; each includes those before it."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    def includes(self, other: Scope) -> bool:
        return _ORDER[self] >= _ORDER[other]


_ORDER = {scope: n for n, scope in enumerate(Scope)}


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token."""

    id: str
    name: str
    scope: Scope
    namespaces: tuple[str, ...]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    digest: str
    checkpoint: str

    @property
    def is_valid(self) -> bool:
        return self.revoked_at is None and (self.expires_at is None or datetime.now(UTC) < self.expires_at)

    def to_json(self) -> dict[str, object]:
        """Everything but the digest."""
        return {
            "id": self.id,
            "name": self.name,
            "scope": str(self.scope),
            "namespaces": list(self.namespaces),
            "created_at": self.created_at.isoformat(),
            "expires_at": _text(self.expires_at),
            "revoked_at": _text(self.revoked_at),
            "valid": self.is_valid,
        }


class Tokens:
    """The tokens of a store. `manager` is open in the namespace ACCESS."""

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = manager
        self._known: dict[str, tuple[float, Token | None]] = {}
        self._ever: tuple[float, bool] | None = None
        self._lock = threading.Lock()

    def create(
        self, name: str, scope: Scope | str, namespaces: Iterable[str], *, expires_days: float | None = None
    ) -> tuple[Token, str]:
        """A new token, and its text, which nobody can see again."""
        parse_name("token name", name)
        wanted = parse_choice(Scope, scope)
        places = tuple(dict.fromkeys(parse_name("namespace", namespace) for namespace in namespaces))
        if not places or ACCESS in places:
            raise Validation(f"a token for {', '.join(places) or 'no namespace'}", hint="name the namespaces it is for")
        if expires_days is not None and not 0 < expires_days <= _LONGEST_DAYS:
            raise Validation(f"a token that expires in {expires_days:g} days", hint=f"use up to {_LONGEST_DAYS} days")
        if any(token.name == name and token.is_valid for token in self.all()):
            raise Conflict(f"there is a token {name} already", hint="revoke it first, or choose another name")
        token_id = secrets.token_hex(6)
        text = f"kd_{token_id}_{secrets.token_urlsafe(32)}"
        now = datetime.now(UTC)
        record = {
            "id": token_id,
            "name": name,
            "scope": str(wanted),
            "namespaces": list(places),
            "created_at": now.isoformat(),
            "expires_at": _text(now + timedelta(days=expires_days)) if expires_days is not None else None,
            "digest": digest_of(text),
        }
        saved = self._manager.save(JOB, name, None, metadata=record, idempotency_key=token_id)
        self._ever = None
        return _token(self._manager.get(saved)), text

    def all(self) -> list[Token]:
        """Every token ever made, oldest first."""
        return [_token(checkpoint) for checkpoint in self._manager.walk(JOB)]

    def revoke(self, name_or_id: str) -> Token:
        """From now on, and within a second everywhere, nobody gets in with it."""
        known = self.all()
        matches = [token for token in known if token.id == name_or_id]  # before one that is named like it
        matches = matches or [token for token in known if token.name == name_or_id]
        if not matches:
            raise NotFound(f"there is no token {name_or_id[:80]}", hint="kedge token list shows them")
        if not (valid := [token for token in matches if token.revoked_at is None]):
            raise Conflict(f"token {name_or_id} is revoked already", hint="nothing is left to do")
        self._manager.tag(valid[-1].checkpoint, revoked=datetime.now(UTC).isoformat())
        self._known.pop(valid[-1].id, None)
        return _token(self._manager.get(valid[-1].checkpoint))

    def remember_made(self) -> bool | None:
        """`were_made` from memory alone; None when that cannot tell."""
        remembered = self._ever
        if remembered is not None and (remembered[1] or time.monotonic() - remembered[0] < REMEMBERED_S):
            return remembered[1]
        return None

    def were_made(self) -> bool:
        """Whether there ever was one: a store whose tokens are all revoked is closed, not open."""
        if (remembered := self.remember_made()) is not None:
            return remembered
        job = self._manager.catalogue.job(JOB)  # which stays when its checkpoints are deleted
        self._ever = time.monotonic(), job is not None and job.last_seq > 0
        return self._ever[1]

    def find(self, text: str) -> Token | None:
        """The valid token with this text. The comparison takes the same time wherever the texts differ."""
        parts = _TOKEN.fullmatch(text)
        if parts is None:
            return None
        token = self.get(parts[1])
        is_right = hmac.compare_digest(digest_of(text), token.digest if token else "")
        return token if token is not None and is_right and token.is_valid else None

    def holds(self, token: Token) -> bool:
        """Whether a token that was found once is valid still."""
        current = self.get(token.id)
        return current is not None and current.is_valid

    def recall(self, text: str) -> tuple[bool, Token | None]:
        """`find` from memory alone: whether it could be answered, and the answer."""
        parts = _TOKEN.fullmatch(text)
        if parts is None:
            return True, None
        known = self._known.get(parts[1])
        if known is None or time.monotonic() - known[0] >= REMEMBERED_S:
            return False, None
        return True, self.find(text)

    def get(self, token_id: str) -> Token | None:
        """The token with this ID, valid or not."""
        known = self._known.get(token_id)
        if known is not None and time.monotonic() - known[0] < REMEMBERED_S:
            return known[1]
        stored = self._manager.load_by_key(JOB, token_id)
        token = None if stored is None else _token(stored[0])
        with self._lock:
            if len(self._known) >= 1024:
                self._known.clear()
            self._known[token_id] = time.monotonic(), token
        return token


def own_job(kind: str, namespace: str) -> str:
    """The job in the namespace ACCESS that holds what the service keeps of this kind for a namespace."""
    name = f"{kind}.{namespace}"
    return name if len(name) <= 128 else f"{kind}.{digest_of(namespace)[:32]}"


def _token(checkpoint: Checkpoint) -> Token:
    about = checkpoint.metadata
    names = about["namespaces"]
    assert isinstance(names, list)  # as `create` wrote it  # nosec B101
    return Token(
        id=str(about["id"]),
        name=str(about["name"]),
        scope=Scope(str(about["scope"])),
        namespaces=tuple(map(str, names)),
        created_at=datetime.fromisoformat(str(about["created_at"])),
        expires_at=_moment(about["expires_at"]),
        revoked_at=_moment(checkpoint.tags.get(_REVOKED)),
        digest=str(about["digest"]),
        checkpoint=checkpoint.id,
    )


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _moment(text: object) -> datetime | None:
    return None if text is None else datetime.fromisoformat(str(text))


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()
