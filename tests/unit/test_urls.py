"""From a URL to a store: what is misspelt, and what an extra brings."""

from __future__ import annotations

import sys

import pytest

import kedge
from tests.parts import require


@pytest.mark.parametrize("option", ["blob", "Blobs", "bolbs", "blobss"])
def test_a_misspelt_option_is_named(option: str) -> None:
    require("module:psycopg")
    with pytest.raises(kedge.Validation, match="did you mean blobs=") as caught:
        kedge.open(f"postgresql://localhost:1/none?{option}=s3://bucket/prefix")
    assert option in str(caught.value)


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
    for name in [
        name for name in sys.modules if name.startswith(("kedge.client", "kedge.index.postgres", "kedge.blobs.objects"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(kedge.Validation, match=f"needs {module}") as caught:
        kedge.open(url)
    assert f"[{extra}]" in caught.value.hint
