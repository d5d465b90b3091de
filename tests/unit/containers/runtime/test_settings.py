"""What /etc/kedge/runc.env says holds for commands beside the engines too."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

import kedge
from kedge.cli.app import cli
from kedge.containers.runtime import settings


@pytest.fixture(name="file")
def _file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(settings, "FILE", str(tmp_path / "runc.env"))
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what is adopted is gone with the test
    return tmp_path / "runc.env"


def test_there_is_none(file: Path) -> None:
    before = dict(os.environ)
    assert settings.adopt() == {}
    assert os.environ == before


def test_everything_it_says(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for kedge-runc: also what only an object store understands, and nothing of the shell's own."""
    file.write_text("PATH=/opt/kedge/bin:${PATH}\nKEDGE_STORE='s3 & co'\nAWS_REGION=here\n")
    monkeypatch.setitem(os.environ, "PATH", "/bin")
    monkeypatch.setitem(os.environ, "AWS_REGION", "there")
    assert settings.adopt() == {"PATH": "/opt/kedge/bin:/bin", "KEDGE_STORE": "s3 & co", "AWS_REGION": "here"}
    assert os.environ["KEDGE_STORE"] == "s3 & co"
    assert os.environ["AWS_REGION"] == "there"  # who says otherwise is heard
    assert os.environ["PATH"] == "/bin:/opt/kedge/bin:/bin"


@pytest.mark.parametrize(
    ("text", "why"),
    [("KEDGE_STORE='x\n", "cannot be read"), ("exit 3\n", "exit status 3"), ("exec sleep 600\n", "timed out")],
)
def test_settings_that_no_shell_reads(file: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str) -> None:
    if why == "timed out":
        monkeypatch.setattr(settings, "_READ_S", 0.3)
    file.write_text(text)
    with pytest.raises(kedge.Validation, match=why):
        settings.read()


@pytest.mark.parametrize("is_configured", [True, False])
def test_the_store_of_the_engines(file: Path, monkeypatch: pytest.MonkeyPatch, is_configured: bool) -> None:
    """Commands about containers look where kedge-runc keeps them, unless they are told another place."""
    monkeypatch.chdir(file.parent)
    if is_configured:
        file.write_text(f"KEDGE_STATE_DIR='{file.parent}'\n")
    else:  # a node whose engines keep it at the usual place
        monkeypatch.setitem(os.environ, "KEDGE_STATE_DIR", str(file.parent))
    os.environ.pop("KEDGE_STORE", None)
    for place in ("containers", "other"):
        with kedge.open(file.parent / place, namespace="containers") as store:
            store.save(f"container:{place}", "k", {}, metadata={"kind": "container"})
    for words, found in (((), "containers"), (("--store", "other"), "other")):
        answer = CliRunner().invoke(cli, ["container", "list", "--json", *words])
        assert [one["job"] for one in json.loads(answer.stdout)["checkpoints"]] == [f"container:{found}"]
