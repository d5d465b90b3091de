"""From a URL to a store: what is misspelt, and what an extra brings."""

from __future__ import annotations

import sys

import pytest

import kedge
from kedge import urls
from kedge.urls import without_secrets
from tests.parts import require


@pytest.mark.parametrize("option", ["blob", "Blobs", "bolbs", "blobss"])
def test_a_misspelt_option_is_named(option: str) -> None:
    require("module:psycopg")
    with pytest.raises(kedge.Validation, match="did you mean blobs=") as caught:
        kedge.open(f"postgresql://localhost:1/none?{option}=s3://bucket/prefix")
    assert option in str(caught.value)


@pytest.mark.parametrize(
    ("url", "place", "blobs"),
    [
        ("postgresql:///db?host=/run/a+b", "postgresql:///db?host=/run/a+b", None),
        ("postgresql://?service=kedge", "postgresql://?service=kedge", None),
        ("postgresql://u@/db?host=/run&blobs=file:/a+b", "postgresql://u@/db?host=/run", "file:/a+b"),
        ("postgresql:///db?blobs=s3://b/p", "postgresql:///db", "s3://b/p"),
        ("postgresql:///db?blobs=file:%2Fa%20b", "postgresql:///db", "file:/a b"),
        ("postgres://h:1,i:2/db?options=-c%20a%3Db&x=", "postgres://h:1,i:2/db?options=-c%20a%3Db&x=", None),
    ],
)
def test_libpq_gets_its_part_of_a_url_as_it_was_written(
    url: str, place: str, blobs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("module:psycopg")
    import psycopg

    asked: list[str] = []

    def connect(conninfo: str, **_: object) -> None:
        asked.append(conninfo)
        raise psycopg.errors.InvalidCatalogName("not here")

    monkeypatch.setattr(psycopg, "connect", connect)
    with pytest.raises(kedge.CheckpointError):
        urls.open_server(url).migrate(create=False)
    assert asked == [place]
    assert urls.blobs_of(url) == blobs


def test_no_password_is_shown() -> None:
    for url in ("postgresql://u:geheim@h/db", "postgresql:///db?user=u&password=geheim&host=h", "http://u:geheim@h"):
        assert "geheim" not in without_secrets(url)
    assert without_secrets("postgresql:///db?host=/run") == "postgresql:///db?host=/run"


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(kedge.Validation, match="unsupported store URL scheme: mysql"):
        kedge.open("mysql://host/database")


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("http://127.0.0.1:9", "httpx", "client"),
        ("postgresql://localhost:1/none", "psycopg", "postgres"),
        ("postgresql://localhost:1/none?blobs=s3://bucket/prefix", "obstore", "object"),
    ],
)
def test_a_missing_extra_is_one_line(url: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require("module:psycopg")
    again = ("kedge.client", "kedge.index.postgres", "kedge.blobs.objects")
    for name in sorted((name for name in sys.modules if name.startswith(again)), reverse=True):
        package, _, child = name.rpartition(".")
        monkeypatch.delattr(sys.modules.get(package), child, raising=False)  # later tests find one module, not two
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(kedge.Validation, match=f"needs {module}") as caught:
        kedge.open(url)
    assert f"[{extra}]" in caught.value.hint
