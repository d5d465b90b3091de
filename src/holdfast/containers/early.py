"""The beginning of `holdfast-runc create` for a container that opted in, and mostly all of it.

A workload that was never kept has nothing to bring back: its container is marked as one that opted in, and the real
runc makes it. Finding that out is what its engine waits for, so this is started without site-packages (`python -IS`)
and imports next to nothing; SQLite, which is needed anyway, reads and writes the JSON. Whatever is not that plain —
there is a generation, the store is not a directory, something is wrong — is done by `runtime`, from the start.
"""

from __future__ import annotations

import os
import sys

from . import runc_arguments
from .opting import POD, has_made_up_name, wish_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from sqlite3 import Connection
    from typing import NoReturn

STATE = "/run/holdfast/runc"
# What a mark repeats of the engine's environment, so that others keep the container where its engine would.
PLACES = ("HOLDFAST_STORE", "HOLDFAST_KEY_FILE", "HOLDFAST_STATE_DIR", "HOLDFAST_RUNC", "PATH")


def main(argv: list[str]) -> NoReturn:
    real, *words = argv
    try:
        is_marked = mark_first(runc_arguments.parse(words))
    except Exception:  # noqa: BLE001 - whatever it is, runtime meets it again and says so
        is_marked = False
    if is_marked:
        os.execv(real, [real, *words])  # nosec B606
    import site

    site.main()
    from .runtime import main as do

    sys.exit(do(argv))


def mark_first(call: runc_arguments.Call) -> bool:
    """Whether this is the first container of its workload; then its mark is written."""
    identity, root = call.container_id, call.get("root") or "/run/runc"
    if call.problem is not None or call.command != "create" or "/" in identity or identity in ("", ".", ".."):
        return False
    if os.path.lexists(f"{root}/{identity}"):
        return False  # taken, it seems
    from holdfast.peeking import has_checkpoints

    bundle = os.path.abspath(call.get("bundle") or ".")
    json = _json()
    wish = wish_of(_read_spec(json, f"{bundle}/config.json"), _own_name)
    if wish is None or wish.restore not in ("latest", "no"):
        return False
    if has_checkpoints(store_url(os.environ), f"container:{wish.key}") is not False:
        return False  # also of one that wants nothing back: it may hibernate
    environment = {name: value for name in PLACES if (value := os.environ.get(name))}
    facts = {"wish": wish.facts(), "restored": None, "bundle": bundle, "environment": environment}
    write_mark(mark_path(root, identity), _to_json(json, facts))
    return True


def _own_name(notes: Mapping[str, str]) -> str:
    """The pod's name, where that is who it is; an error where a controller made it up, and the engine must be asked."""
    name = notes[POD[1]]
    if has_made_up_name(name):
        raise ValueError(name)
    return name


def store_url(environment: Mapping[str, str]) -> str:
    """Where containers are kept; in a place of this machine when nobody says."""
    state = environment.get("HOLDFAST_STATE_DIR") or os.environ.get("HOLDFAST_STATE_DIR") or "/var/lib/holdfast"
    return environment.get("HOLDFAST_STORE") or f"{state}/containers"


def mark_path(root: str, identity: str) -> str:
    """Where it is remembered that a container opted in."""
    return f"{os.environ.get('HOLDFAST_RUNC_STATE') or STATE}/{root}/{identity}"


def write_mark(path: str, text: str) -> None:
    """Write a mark whole, by rename: another call may read it at any moment."""
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True, mode=0o700)
    new = f"{folder}/{name}~{os.getpid()}"  # no container's ID has such a character: nobody takes it for a mark
    with open(new, "w") as file:
        file.write(text)
    os.rename(new, path)


def _json() -> Connection:
    import _sqlite3

    return _sqlite3.connect(":memory:")


def _read_spec(json: Connection, path: str) -> dict[str, object]:
    """What opting in looks at: the environment and the annotations, texts all of them."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    ask = "SELECT key, value, type = 'text' FROM json_each(?, ?)"
    environment = json.execute(ask, (text, "$.process.env")).fetchall()
    annotations = json.execute(ask, (text, "$.annotations")).fetchall()
    if not all(is_text for _, _, is_text in environment + annotations):
        raise ValueError(path)
    return {
        "process": {"env": [value for _, value, _ in environment]},
        "annotations": {key: value for key, value, _ in annotations},
    }


def _to_json(json: Connection, value: object) -> str:
    """As Python's json would: the front looks for `"restored": null`."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_to_json(json, name)}: {_to_json(json, one)}" for name, one in value.items()) + "}"
    return str(json.execute("SELECT json_quote(?)", (value,)).fetchone()[0])
