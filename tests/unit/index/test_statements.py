"""Which statements a save takes: each costs a hand-over between threads."""

from __future__ import annotations

from pathlib import Path

from kedge.index.sqlite.index import SqliteIndex
from kedge.testing.index_fixtures import chunk, record, save, with_chunks


def test_a_save_with_chunks_is_one_statement_besides_them_if_its_job_is_known(tmp_path: Path) -> None:
    index = SqliteIndex(str(tmp_path / "index.sqlite"))
    here = chunk("here")
    (first,) = save(index, with_chunks(here))
    save(index, record())
    statements: list[str] = []
    index._connection.set_trace_callback(statements.append)
    new = with_chunks(chunk("new"), reused=[here], parent=first.id, idempotency_key="key", tags={"a": "b"})
    (saved,) = save(index, new)
    index._connection.set_trace_callback(None)
    assert any("temp.new_save" in sql for sql in statements)
    assert not any(sql.startswith("INSERT INTO main.checkpoint") for sql in statements)
    assert index.locate([chunk("new").digest])
    assert index.get(saved.id).tags == {"a": "b"}
    index.close()
