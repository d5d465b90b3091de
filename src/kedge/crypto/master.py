"""The master key: 32 bytes from an argument, the environment, a file, or a command that asks a KMS."""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field

from kedge.errors import StorageError, Validation, storage_error

KEY_BYTES = 32
_PREFIX = "kdk1_"
_TEXT = re.compile(r"kdk1_([A-Za-z0-9_-]{43})")
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_MAX_SOURCE_BYTES = 4096  # limit for a file or a command's output
_COMMAND_TIMEOUT_S = 60
_FORMS = (
    "give 32 bytes, what `kedge key new` prints, 64 hex digits, file:PATH, or command:PROGRAM ARGUMENTS; "
    "a passphrase is not a key"
)


@dataclass(frozen=True, slots=True)
class MasterKey:
    """The master key. It appears in no repr, error or log; `id` names it and reveals nothing."""

    secret: bytes = field(repr=False)

    @property
    def id(self) -> str:
        return hmac.digest(self.secret, b"kedge master key id", "sha256")[:8].hex()


def new_master_text() -> str:
    """Return a new random key as text."""
    return _PREFIX + base64.urlsafe_b64encode(os.urandom(KEY_BYTES)).decode().rstrip("=")


def find_master(given: bytes | str | None) -> MasterKey | None:
    """Return the given key, or that of $KEDGE_KEY or $KEDGE_KEY_FILE, or None."""
    if given is not None:
        return parse_master(given)
    text, path = os.environ.get("KEDGE_KEY"), os.environ.get("KEDGE_KEY_FILE")
    if text == "none":
        return None
    if text and path:
        raise Validation("$KEDGE_KEY and $KEDGE_KEY_FILE are both set", hint="unset one of them")
    if text:
        return parse_master(text)
    return parse_master(f"file:{path}") if path else None


def parse_master(given: bytes | str) -> MasterKey:
    """Parse a key in any of its forms. Errors never show what was given."""
    if isinstance(given, str) and given.startswith("file:"):
        return _parse(_read_file(given.removeprefix("file:")), "the content of the key file")
    if isinstance(given, str) and given.startswith("command:"):
        return _parse(_ask(given.removeprefix("command:")), "the output of the key command")
    if not isinstance(given, bytes | str):
        raise Validation(f"a key of type {type(given).__name__}", hint=_FORMS)
    return _parse(given, "this")


def _parse(data: bytes | str, origin: str) -> MasterKey:
    if isinstance(data, bytes) and len(data) == KEY_BYTES:
        return MasterKey(data)
    try:
        text = (data if isinstance(data, str) else data.decode("ascii")).strip()
        if match := _TEXT.fullmatch(text):
            return MasterKey(base64.b64decode(match[1] + "=", altchars=b"-_", validate=True))
        if _HEX.fullmatch(text):
            return MasterKey(bytes.fromhex(text))
    except (UnicodeDecodeError, binascii.Error):
        pass
    raise Validation(f"{origin} is not a key", hint=_FORMS) from None


def _read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_SOURCE_BYTES)
    except OSError as error:
        raise storage_error("read the key file", path, error) from error
    except ValueError as error:
        raise Validation("the path of the key file is not valid", hint=_FORMS) from error


def _ask(command: str) -> bytes:
    """Return a command's output, the hook for a KMS. Started from a list of arguments, never through a shell."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise Validation(f"the key command cannot be split into words: {error}", hint="close its quotes") from error
    if not arguments:
        raise Validation("the key command is empty", hint="use command:PROGRAM ARGUMENTS")
    name = arguments[0]
    try:
        done = subprocess.run(
            arguments, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=_COMMAND_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise StorageError(
            f"the key command {name} did not finish within {_COMMAND_TIMEOUT_S} s", hint="run it by hand to see why"
        ) from None
    except OSError as error:
        raise storage_error("run the key command", name, error) from error
    if done.returncode:
        raise StorageError(
            f"the key command {name} failed with exit code {done.returncode}", hint="run it by hand to see why"
        )
    return done.stdout[:_MAX_SOURCE_BYTES]
