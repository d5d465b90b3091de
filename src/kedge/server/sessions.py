"""Sessions: what a browser holds after signing in. They stand for a token, and end by themselves or by signing out.

A browser sends a cookie to every port of a host. So it never gets the token, which opens the API for as long as it is
valid, but a session: good for this service and for half a day. Like tokens, sessions are checkpoints in the namespace
that is never served, and only their SHA-256 is kept.

    ks_<12 hex: its ID>_<43 characters: 256 random bits>
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
import time
from datetime import UTC, datetime, timedelta

from kedge.manager import CheckpointManager
from kedge.model import Checkpoint

from .tokens import REMEMBERED_S, Token, Tokens, digest_of

JOB = "sessions"
LIFETIME = timedelta(hours=12)
MOST = 1000  # who signs in more often loses the oldest ones
_SESSION = re.compile(r"ks_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")


class Sessions:
    """The sessions of a store. `manager` is open in the namespace of the tokens."""

    def __init__(self, manager: CheckpointManager, tokens: Tokens) -> None:
        self._manager = manager
        self._tokens = tokens
        self._recent: dict[str, tuple[float, Checkpoint | None]] = {}
        self._lock = threading.Lock()

    def create(self, token: Token) -> str:
        """Sign in: the text of a new session, which nobody can see again."""
        session_id = secrets.token_hex(6)
        text = f"ks_{session_id}_{secrets.token_urlsafe(32)}"
        record = {
            "token": token.id,
            "digest": digest_of(text),
            "expires_at": (datetime.now(UTC) + LIFETIME).isoformat(),
        }
        self._manager.save(JOB, token.name, None, metadata=record, idempotency_key=session_id)
        self._delete_expired()
        return text

    def find(self, text: str) -> Token | None:
        """The token a session stands for, while both are valid."""
        session = self._get(text)
        if session is None or _has_expired(session):
            return None
        token = self._tokens.get(str(session.metadata["token"]))
        return token if token is not None and token.is_valid else None

    def end(self, text: str) -> None:
        """Sign out: from now on, and within a second everywhere, nobody gets in with it."""
        session = self._get(text)
        if session is not None:
            self._manager.delete(JOB, session.id)
            with self._lock:
                self._recent.clear()

    def _get(self, text: str) -> Checkpoint | None:
        parts = _SESSION.fullmatch(text)
        if parts is None:
            return None
        session = self._look_up(parts[1])
        is_right = hmac.compare_digest(digest_of(text), str(session.metadata["digest"]) if session else "")
        return session if is_right else None

    def _look_up(self, session_id: str) -> Checkpoint | None:
        remembered = self._recent.get(session_id)
        if remembered is not None and time.monotonic() - remembered[0] < REMEMBERED_S:
            return remembered[1]
        session = self._manager.get_by_key(JOB, session_id)
        with self._lock:
            if len(self._recent) >= 1024:
                self._recent.clear()
            self._recent[session_id] = time.monotonic(), session
        return session

    def _delete_expired(self) -> None:
        for session in self._manager.list(JOB, limit=100, after=0):  # the oldest
            if not _has_expired(session):
                break
            self._manager.delete(JOB, session.id)
        self._manager.cleanup(JOB, MOST)


def _has_expired(session: Checkpoint) -> bool:
    return datetime.now(UTC) >= datetime.fromisoformat(str(session.metadata["expires_at"]))
