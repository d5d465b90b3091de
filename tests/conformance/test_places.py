"""What cannot be opened by its URL is refused, with the way to do it instead.

What can be is tried in test_encrypted_stores.py: plain, encrypted and with names hidden.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kedge
from kedge.errors import CheckpointError, NotAStore, Validation

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster

REFUSED = {
    "s3://bucket/prefix": "add a database: postgresql",
    "gs://bucket/prefix": "add a database: postgresql",
    "az://container": "add a database: postgresql",
    "{0}/store?blobs=s3://bucket/prefix": "use postgresql",
    "file:{0}/store?blobs=file:/elsewhere": "use postgresql",
    "files:{0}/store?blobs=s3://bucket/prefix": "use postgresql",
    "memory:?blobs=s3://bucket/prefix": "use postgresql",
    "memory:{0}/store?blobs=file:/elsewhere": "use postgresql",
    "redis://host/0": "use a directory",
    "mysql:host": "use a directory",
    "files:": "use a directory",
    "file:": "use a directory",
    "postgresql://nowhere/db?blobs=": "use s3://",
    "postgresql://nowhere/db?blobs=s3://": "use s3://",
    "postgresql://nowhere/db?blobs=s3:bucket": "use s3://",
    "postgresql://nowhere/db?blobs=ftp://host/prefix": "use s3://",
    "postgresql://nowhere/db?blobs=packs": "use s3://",
    "postgresql://nowhere/db?blobs=memory:": "use s3://",
    "postgresql://nowhere/db?blobs=files:{0}/packs": "use s3://",
    "postgresql://nowhere/db?blobs=file:packs": "use blobs=file:/path",
    "postgresql://nowhere/db?blobs=az://container/prefix": "AZURE_STORAGE_ACCOUNT_NAME",
}


@pytest.mark.requires("module:psycopg", "module:obstore")
@pytest.mark.parametrize("key", [None, bytes(32)])
@pytest.mark.parametrize("url", REFUSED)
def test_what_cannot_be_opened_is_refused_and_nothing_is_made(
    tmp_path: Path, url: str, key: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Validation) as refusal:
        kedge.open(url.format(tmp_path), key=key)
    assert REFUSED[url] in refusal.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.requires("module:obstore")
@pytest.mark.parametrize(
    ("url", "kind", "root"),
    [
        ("gs://bucket/some/prefix", "GCSStore", "some/prefix/"),
        ("az://box", "AzureStore", ""),
        ("s3://b/p", "S3Store", "p/"),
    ],
)
def test_addresses_of_each_cloud_are_understood(
    url: str, kind: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kedge.blobs.objects import connect

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    blobs = connect(url)
    assert (type(blobs.store).__name__, blobs.root) == (kind, root)


@pytest.mark.xdist_group("postgres")
@pytest.mark.requires("postgres")
def test_packs_of_a_database_stay_with_it(postgres: Cluster, tmp_path: Path) -> None:
    database = postgres.empty_database()
    large = random.Random(1).randbytes(200_000)
    with kedge.open(f"{database}&blobs=file:{tmp_path / 'packs'}") as store:
        saved = store.save("j", "s", large)
        assert store.load(saved, mapped=True) == large
    with pytest.raises(NotAStore, match="holds none of the 1 packs"):  # as on another machine
        kedge.open(f"{database}&blobs=file:{tmp_path / 'other'}")
    with kedge.open(f"{database}&blobs=file://{tmp_path / 'packs'}") as store:
        assert store.load(saved) == large
        store.delete("j", saved)
        assert store.gc().packs_kept == 0
    kedge.open(tmp_path / "embedded").close()
    (tmp_path / "file").touch()
    for wrong in ("embedded", "file"):
        with pytest.raises(NotAStore):
            kedge.open(f"{database}&blobs=file:{tmp_path / wrong}")
    with pytest.raises(CheckpointError):
        kedge.open(f"{database}&blobs=file:/proc/nowhere")
