"""Shared by the suites of `ports.Index`: how to open an adapter, and records to save."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kedge.model import Checkpoint, CheckpointId
from kedge.ports import Chunk, Encoding, Index, NewCheckpoint
from kedge.ports import digest_of as digest_of
from kedge.store.request import Request

_numbers = itertools.count(1)


def record(job: str = "job", **fields: Any) -> NewCheckpoint:
    """Return a save with its own ID; `fields` replace defaults."""
    number = next(_numbers)
    manifest = fields.pop("manifest", b"manifest %d" % number)
    checkpoint_id = CheckpointId(f"step_1700000000_{number:08x}")
    created_us = 1_700_000_000_000_000 + number
    usual = Request(job, "step").record(checkpoint_id, created_us, 10, manifest, content=b"")
    return replace(usual, **{"stored_bytes": 7, **fields})


def chunk(text: str, pack: str = "pack-1", offset: int = 0) -> Chunk:
    return Chunk(digest_of(text.encode()), 100, 60, Encoding.ZSTD, pack, offset)


def with_chunks(*chunks: Chunk, job: str = "job", reused: Iterable[Chunk] = (), **fields: object) -> NewCheckpoint:
    """Return a save whose manifest is the digests it names, which `references` below reads."""
    named = [*(c.digest for c in chunks), *(c.digest for c in reused)]
    return record(
        job,
        manifest=b"".join(named),
        has_chunks=True,
        new_chunks=chunks,
        reused_chunks=[c.digest for c in reused],
        **fields,
    )


def references(_: str, manifest: bytes) -> list[bytes]:
    return [manifest[i : i + 32] for i in range(0, len(manifest), 32)]


def save(index: Index, *records: NewCheckpoint) -> list[Checkpoint]:
    return index.commit(records or [record()], actor="tester")


class IndexFixtures:
    """How the suite opens an adapter."""

    is_shared = True  # whether two objects can be opened on one store
    seals = False  # whether rows are encrypted: then digests are those of ciphertext, and a key is the first event

    many = 1200  # number of checkpoints for large tests; fewer if each costs files

    def open_index(self, where: Path, namespace: str = "default") -> Index:
        """Return an adapter on the store for `where`, a directory that only this test uses."""
        raise NotImplementedError

    @pytest.fixture
    def index(self, tmp_path: Path) -> Iterator[Index]:
        index = self.open_index(tmp_path)
        yield index
        assert index.integrity_problems() == []
        index.close()

    def need_sharing(self) -> None:
        if not self.is_shared:
            pytest.skip("one object is the whole store")

    @pytest.fixture
    def other(self, index: Index, tmp_path: Path) -> Iterator[Index]:
        """Return a second, independent object on the store of `index`."""
        self.need_sharing()
        other = self.open_index(tmp_path)
        yield other
        other.close()

    @pytest.fixture
    def peer(self, index: Index, tmp_path: Path) -> Iterator[Index]:
        """Return `other`; if one object is the whole store, that one."""
        peer = self.open_index(tmp_path) if self.is_shared else index
        yield peer
        if peer is not index:
            peer.close()

    @pytest.fixture
    def tenant(self, index: Index, tmp_path: Path) -> Iterator[Index]:
        """Return another namespace of the store of `index`; if one object is the whole store, of another store."""
        tenant = self.open_index(tmp_path, namespace="tenant")
        yield tenant
        tenant.close()
