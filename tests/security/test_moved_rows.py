"""I10: whoever writes to an encrypted index cannot move tags, keys or rows to other places unnoticed.

Each attack succeeds in the index itself: it is a transaction like any other, so that every table fits every other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kedge
from kedge.index.encrypted import EncryptedIndex
from kedge.ports import Selection
from kedge.store.local import LocalStore
from tests.parts import require

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster

KEY = bytes(range(32)).hex()
INDEXES = ["file", "files", pytest.param("postgresql", marks=pytest.mark.requires("postgres"))]

pytestmark = pytest.mark.xdist_group("postgres")


@dataclass
class Victim:
    """A store with two checkpoints that differ in everything that can be swapped."""

    url: str
    store: kedge.CheckpointManager
    first: str
    second: str

    def index(self, namespace: str = "default") -> Any:
        store = self.store.store if namespace == "default" else self.tenant.store
        assert isinstance(store, LocalStore)
        assert isinstance(store.index, EncryptedIndex)
        return store.index.inner

    def attack(self, *statements: tuple[str, tuple[object, ...]]) -> None:
        """Write to the index as its owner can."""
        inner = self.index()

        def write(writes: Any) -> None:
            for sql, parameters in statements:
                writes._do(sql, *parameters)

        if self.url.startswith("postgresql"):
            inner._write_again(write)
        else:
            inner._write(lambda: write(inner._writes))

    def row(self, checkpoint_id: str) -> tuple[Any, ...]:
        sql = 'SELECT "row", tags, metadata, digest, manifest FROM main.checkpoint WHERE id = ?'
        (found,) = self.index()._all(sql, checkpoint_id)
        return tuple(found)

    def set(self, checkpoint_id: str, **columns: object) -> tuple[str, tuple[object, ...]]:
        names = ", ".join(f"{name} = ?" for name in columns)
        return f"UPDATE main.checkpoint SET {names} WHERE id = ?", (*columns.values(), checkpoint_id)

    def problems(self) -> list[str]:
        return [f"{problem.subject} {problem.what}" for problem in self.store.verify().problems]

    def is_noticed(self, *ids: str) -> None:
        for checkpoint_id in ids:
            with pytest.raises(kedge.Corrupted):
                self.store.get(checkpoint_id)
            with pytest.raises(kedge.Corrupted):
                self.store.load(checkpoint_id)
        with pytest.raises(kedge.Corrupted):
            self.store.list("job")
        found = " ".join(self.problems())
        assert all(checkpoint_id in found for checkpoint_id in ids)

    tenant: kedge.CheckpointManager = None  # type: ignore[assignment]


@pytest.fixture(params=INDEXES)
def victim(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Victim]:
    require("module:cryptography")
    if request.param == "postgresql":
        cluster: Cluster = request.getfixturevalue("postgres")
        url = cluster.empty_database()
    else:
        url = f"{request.param}:{tmp_path / 'store'}"
    with kedge.open(url, key=KEY) as store, kedge.open(url, namespace="tenant", key=KEY) as tenant:
        first = store.save("job", "one", 1, tags={"env": "test", "by": "a"}, idempotency_key="key 1")
        second = store.save("job", "two", 2, tags={"env": "prod"}, idempotency_key="key 2")
        victim = Victim(url, store, first, second)
        victim.tenant = tenant
        assert victim.problems() == []
        yield victim


def swap_tables(table: str, first: int, second: int) -> list[tuple[str, tuple[object, ...]]]:
    """Give what two rows have in a table to each other."""
    sql = f'UPDATE main.{table} SET "row" = ? WHERE "row" = ?'
    return [(sql, (-1, first)), (sql, (first, second)), (sql, (second, -1))]


def test_tags_of_another_checkpoint(victim: Victim) -> None:
    (row_1, tags_1, *_), (row_2, tags_2, *_) = victim.row(victim.first), victim.row(victim.second)
    victim.attack(
        victim.set(victim.first, tags=tags_2),
        victim.set(victim.second, tags=tags_1),
        *swap_tables("tag", row_1, row_2),
    )
    victim.is_noticed(victim.first, victim.second)


def test_tags_taken_away(victim: Victim) -> None:
    row, *_ = victim.row(victim.first)
    victim.attack(victim.set(victim.first, tags=None), ('DELETE FROM main.tag WHERE "row" = ?', (row,)))
    victim.is_noticed(victim.first)


def test_tags_by_which_another_checkpoint_is_found(victim: Victim) -> None:
    """The rows are as they were: only the table that finds them was changed."""
    (row_1, *_), (row_2, *_) = victim.row(victim.first), victim.row(victim.second)
    victim.attack(*swap_tables("tag", row_1, row_2))
    with pytest.raises(kedge.Corrupted, match="tags of another checkpoint"):
        victim.store.list("job", tags={"env": "prod"})
    with pytest.raises(kedge.Corrupted, match="tags of another checkpoint"):
        victim.store.catalogue.list_stored("job", Selection(tags={"env": ["prod", "other"]}))
    assert victim.first in " ".join(victim.problems())
    assert victim.store.load(victim.first) == 1


def test_idempotency_keys_of_another_checkpoint(victim: Victim) -> None:
    (row_1, *_), (row_2, *_) = victim.row(victim.first), victim.row(victim.second)
    victim.attack(*swap_tables("idempotency", row_1, row_2))
    index = victim.store.store.index  # type: ignore[attr-defined]
    for look in (
        lambda: index.find("job", ["key 1"]),
        lambda: index.find("job", range(1, 11)),
        lambda: index.keys_of([victim.first]),
        lambda: victim.store.save("job", "one", 1, idempotency_key="key 1"),
    ):
        with pytest.raises(kedge.Corrupted, match="belongs to another checkpoint"):
            look()
    found = " ".join(victim.problems())
    assert victim.first in found
    assert victim.second in found


def test_an_idempotency_key_taken_away(victim: Victim) -> None:
    row, *_ = victim.row(victim.first)
    victim.attack(('DELETE FROM main.idempotency WHERE "row" = ?', (row,)))
    assert victim.first in " ".join(victim.problems())
    assert victim.second not in " ".join(victim.problems())


def test_the_request_of_a_key_changed(victim: Victim) -> None:
    """So that a retry with another state would be answered as if it were the same."""
    row, *_ = victim.row(victim.second)
    (digest,) = victim.index()._all(
        'SELECT request_digest FROM main.idempotency WHERE "row" = ?', victim.row(victim.first)[0]
    )
    victim.attack(('UPDATE main.idempotency SET request_digest = ? WHERE "row" = ?', (digest[0], row)))
    with pytest.raises((kedge.Corrupted, kedge.Conflict)):
        victim.store.save("job", "one", 1, idempotency_key="key 2")
    assert victim.second in " ".join(victim.problems())


def test_a_row_put_back_as_it_was(victim: Victim) -> None:
    number, tags, metadata, *_ = victim.row(victim.first)
    rows = victim.index()._all('SELECT job_no, name, value, "row" FROM main.tag WHERE "row" = ?', number)
    victim.store.tag(victim.first, env="revoked")
    assert victim.store.get(victim.first).tags["env"] == "revoked"
    assert victim.problems() == []
    victim.attack(
        victim.set(victim.first, tags=tags, metadata=metadata),
        ('DELETE FROM main.tag WHERE "row" = ?', (number,)),
        *(("INSERT INTO main.tag VALUES (?, ?, ?, ?)", tuple(row)) for row in rows),
    )
    found = " ".join(victim.problems())
    assert victim.first in found
    assert "before its tags were changed" in found


@pytest.mark.parametrize("columns", [("metadata",), ("manifest", "digest"), ("metadata", "manifest", "digest", "tags")])
def test_ciphertexts_of_another_row(victim: Victim, columns: tuple[str, ...]) -> None:
    names = ("row", "tags", "metadata", "digest", "manifest")
    first, second = (dict(zip(names, victim.row(i), strict=True)) for i in (victim.first, victim.second))
    victim.attack(
        victim.set(victim.first, **{name: second[name] for name in columns}),
        victim.set(victim.second, **{name: first[name] for name in columns}),
    )
    for checkpoint_id in (victim.first, victim.second):
        with pytest.raises(kedge.Corrupted):
            victim.store.load(checkpoint_id)
    assert {victim.first, victim.second} <= set(victim.store.verify().corrupted)


def test_a_row_of_another_namespace(victim: Victim) -> None:
    """Its tenant has the same master key: its rows still do not open elsewhere."""
    theirs = victim.tenant.save("job", "one", "theirs", tags={"env": "test"})
    _, tags, metadata, digest, manifest = victim.row(theirs)
    victim.attack(victim.set(victim.first, tags=tags, metadata=metadata, digest=digest, manifest=manifest))
    with pytest.raises(kedge.Corrupted):
        victim.store.load(victim.first)
    assert victim.first in victim.store.verify().corrupted


def test_what_is_allowed_stays_so(victim: Victim, tmp_path: Path) -> None:
    """Tags change, keys go over to newer checkpoints, keys of the store change: nothing of that is an attack."""
    store = victim.store
    store.tag(victim.first, env="prod", more="yes")
    store.tag(victim.first, env=None)
    store.pin(victim.second)
    assert [c.id for c in store.list("job", tags={"more": "yes"})] == [victim.first]
    store.pin(victim.second, False)
    store.delete("job", victim.second)
    again = store.save("job", "again", 3, idempotency_key="key 2")
    store.rekey(rewrite=True)
    store.tag(again, env="late")
    assert victim.problems() == []
    with kedge.open(tmp_path / "copy", key=bytes(32)) as copy:
        store.copy_to(copy)
        assert [(c.id, c.tags) for c in copy.list("job")] == [(c.id, c.tags) for c in store.list("job")]
        assert copy.verify().problems == ()
        assert copy.save("job", "again", 3, idempotency_key="key 2") == again
