"""What the administrator of a machine says in /etc/kedge/runc.env: which store its engines use, and which
programs. Commands beside the engines do as it says, so that they and `kedge-runc` find each other's checkpoints."""

from __future__ import annotations

import os
import subprocess

from kedge.errors import Validation

from .early import store_url

FILE = "/etc/kedge/runc.env"
_OF_THE_SHELL = ("PWD", "OLDPWD", "SHLVL", "_")
_READ_S = 10.0  # a file of settings that takes longer to read is none


def read() -> dict[str, str]:
    """What the file says, read by a shell as kedge-runc reads it; nothing when there is none, or not for us."""
    if not os.access(FILE, os.R_OK):
        return {}
    command = ["/bin/sh", "-c", f"set -a; . {FILE}; exec env -0"]
    ours = {"PATH": os.environ.get("PATH", "")}
    try:
        output = subprocess.run(
            command, env=ours, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_READ_S
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        reason = os.fsdecode(said).strip() or str(error)
        raise Validation(
            f"{FILE} cannot be read: {reason}", hint="its lines are NAME='value', as for a shell"
        ) from error
    pairs = (entry.partition("=") for entry in os.fsdecode(output).split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs if name not in _OF_THE_SHELL}


def chosen(asked: str, name: str, choices: tuple[str, ...]) -> str:
    """What a container asked for, else what its machine says in that variable, else the first choice."""
    choice = asked or os.environ.get(name) or choices[0]
    if choice not in choices:
        raise Validation(
            f"{name} must be {' or '.join(choices)} (got {choice})", hint=f"set {name}={choices[0]}, or leave it out"
        )
    return choice


def whole_number(name: str, usual: int) -> int:
    """What the machine says in that variable, else the usual."""
    text = os.environ.get(name) or str(usual)
    if not text.isdecimal():
        raise Validation(f"{name}={text} is not a number", hint=f"use a whole number, such as {usual}")
    return int(text)


def adopt() -> dict[str, str]:
    """Read the file; what it says, and our own environment does not contradict, holds for this process from now on."""
    settings = read()
    for name, value in settings.items():
        ours = os.environ.setdefault(name, value)
        if name == "PATH":
            os.environ[name] = f"{ours}:{value}"
    return settings


def adopt_store() -> None:
    """The same; and the store of this machine's engines is ours, unless we have one. Without a file it is where they
    keep it by default, if we may read that."""
    settings, url = adopt(), store_url(os.environ)
    if settings or os.access(url, os.R_OK | os.X_OK):
        os.environ.setdefault("KEDGE_STORE", url)
