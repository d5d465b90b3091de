"""Statements of Kedge, which are written for SQLite, as PostgreSQL reads them."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=512)
def for_postgres(sql: str) -> str:
    """Tables are in a schema of ours, and parameters are marked as psycopg wants it."""
    return sql.replace("main.", "kedge.").replace("%", "%%").replace("?", "%s")
