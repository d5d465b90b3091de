"""What `deploy/service` and `tools/lab` say about the world outside is true of this tree, and of no host."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from pathlib import Path

import yaml

from kedge.cli.app import NAMES, cli

ROOT = Path(__file__).parents[3]
SERVICE = ROOT / "deploy" / "service"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_images_copy_what_exists_and_install_extras_that_exist() -> None:
    for path in (SERVICE / "Containerfile", ROOT / "deploy" / "kubernetes" / "Containerfile"):
        text = path.read_text()
        copied = [
            name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for name in line.split()
        ]
        assert copied
        assert [name for name in copied if not (ROOT / name).exists()] == []
        [named] = re.findall(r"/source\[([\w,]+)\]", text)
        assert set(named.split(",")) <= EXTRAS.keys()
        assert "hatch_build.py" in copied  # without it, nothing is built


def test_images_are_built_from_what_was_checked() -> None:
    """A base image that whoever builds names by its digest; tools and packages by the hashes of the lock."""
    for path in (SERVICE / "Containerfile", ROOT / "deploy" / "kubernetes" / "Containerfile"):
        text = path.read_text()
        assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
        assert re.findall(r"^ARG (.*)", text, re.MULTILINE) == ["BASE"]  # without a default: a tag may move
        assert re.findall(r"/pip install (\S+)", text) == ["--require-hashes"]
        assert re.findall(r"--(?:build-)?constraints (\S+)", text) == ["/requirements/dev.txt"] * 2
    build = yaml.safe_load((SERVICE / "compose.yaml").read_text())["services"]["kedge"]["build"]
    assert build["args"]["BASE"].startswith("${KEDGE_BASE:?")


def test_the_compose_file_runs_commands_that_exist() -> None:
    compose = yaml.safe_load((SERVICE / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"kedge", "kedge-token", "database", "objects"}
    assert (SERVICE / services["kedge"]["build"]["context"] / services["kedge"]["build"]["dockerfile"]).exists()
    assert services["kedge"]["environment"]["KEDGE_STORE"].startswith("postgresql://")
    for words in re.findall(r"kedge (\w+ \w+)", services["kedge-token"]["command"][-1]):
        group, name = words.split()
        command = cli.get_command(None, group)  # type: ignore[arg-type]
        assert name in command.commands  # type: ignore[union-attr]
    for service in services.values():
        assert set(service.get("depends_on", ())) <= services.keys()


def test_the_unit_waits_until_the_service_answers() -> None:
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(SERVICE / "kedge.service")
    assert unit["Service"]["Type"] == "notify"
    assert unit["Service"]["NotifyAccess"] == "all"  # workers say it, not the process that started them
    program, command, *_ = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, command in NAMES) == ("kedge", True)


def test_the_lab_names_no_mirror_of_its_own() -> None:
    text = (ROOT / "tools" / "lab").read_text()
    assert "://" not in text
    assert "apt-get indextargets" in text
