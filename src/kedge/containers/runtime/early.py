"""The beginning of `kedge-runc create` for a container that opted in, and mostly all of it.

A workload without checkpoints has nothing to restore: its container is marked as one that opted in, and the real
runc makes it. Finding that out is what its engine waits for, so this is started without site-packages (`python -IS`)
and imports next to nothing; SQLite, which is needed anyway, reads and writes the JSON. Whatever is not that plain —
there is a generation, the store is not a directory, something is wrong — is done by `calls`, from the start.

containerd writes a bundle before it starts a shim for it, and the shim takes as long to start as this: so
`containerd-shim-kedge-v1` has the same found out meanwhile (`look_ahead`), and `create` needs no Python at all. What
was saved before containerd asked for the container is seen by that look. If there is no answer, or not one for this
call, `create` looks itself.
"""

from __future__ import annotations

import os
import sys
from _signal import alarm  # type: ignore[import-not-found] # what `signal` is made of

from kedge.containers.peek import has_checkpoints, sqlite

from .opt_in import POD, has_made_up_name, wish_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from sqlite3 import Connection
    from typing import NoReturn

    from .arguments import Call

STATE = "/run/kedge/runc"
NAMESPACE = "containers"  # of the store: who may read other namespaces may not read the memory of processes
# What a mark repeats of the engine's environment, so that others use the store that its engine would.
PLACES = ("KEDGE_STORE", "KEDGE_KEY_FILE", "KEDGE_STATE_DIR", "KEDGE_RUNC", "PATH")
AHEAD = "kedge-ahead"  # in a bundle, for the front
AHEAD_S = 10


def main(argv: list[str]) -> NoReturn:
    if argv[0] == "look-ahead":
        look_ahead(*argv[1:])
        os._exit(0)  # putting an interpreter away takes longer than the look
    real, *words = argv
    try:
        from .arguments import parse

        is_marked = mark_first(parse(words))
    except Exception:  # noqa: BLE001 - whatever it is, runtime meets it again and says so
        is_marked = False
    if is_marked:
        os.execv(real, [real, *words])  # nosec B606
    import site

    site.main()
    from .calls import main as do

    sys.exit(do(argv))


def mark_first(call: Call) -> bool:
    """Whether runc is all that it takes: it did not opt in after all, or is the first of its workload, marked now."""
    identity, root = call.container_id, call.get("root") or "/run/runc"
    if call.problem is not None or call.command != "create" or "/" in identity or identity in ("", ".", ".."):
        return False
    if os.path.lexists(f"{root}/{identity}"):
        return False  # taken, it seems
    bundle = os.path.abspath(call.get("bundle") or ".")
    with open(f"{bundle}/config.json", encoding="utf-8") as config:
        text = first_mark(config.read(), bundle)
    if text:
        write_mark(mark_path(root, identity), text)
    return text is not None


def look_ahead(bundle: str, places: str) -> None:
    """Find out what `create` will want to know of the bundle that is the working directory, while its shim starts.

    The answer is a file of the bundle, and gone with it: until when it is good, for which places, and the mark. It
    is as old as the config.json that it is about, so that a later one does not fit. Names are those of the working
    directory: whoever was held up may not answer for another bundle that has the path by now.
    """
    alarm(AHEAD_S)  # its shim waits for us
    with open("/proc/uptime") as clock:
        until = int(clock.read().partition(".")[0]) + AHEAD_S
    with open("config.json", encoding="utf-8") as config:
        written = os.fstat(config.fileno())  # before it is read
        text = first_mark(config.read(), bundle)
    if text:
        with open(f".{AHEAD}", "w") as answer:
            answer.write(f"{until}\n{places}\n{text}\n")
        os.utime(f".{AHEAD}", ns=(written.st_atime_ns, written.st_mtime_ns))
        os.rename(f".{AHEAD}", AHEAD)


def first_mark(config: str, bundle: str) -> str | None:
    """The mark of the first container of a workload; "" for one that did not opt in, None where `runtime` must see."""
    json = sqlite().connect(":memory:")
    wish = wish_of(_read_spec(json, config), _own_name, bundle)
    if wish is None:
        return ""
    if wish.restore not in ("latest", "no") or (wish.place and os.path.lexists(wish.place)):
        return None
    if has_checkpoints(store_url(os.environ), f"container:{wish.key}", NAMESPACE) is not False:
        return None  # also of one that wants nothing back: it may hibernate
    if wish.namespace and _is_marked(_to_json(json, wish.key)):
        return None  # another one of the workload may be about to go, and be kept
    environment = {name: value for name in PLACES if (value := os.environ.get(name))}
    return _to_json(json, {"wish": wish.facts(), "restored": None, "bundle": bundle, "environment": environment})


def _is_marked(key: str) -> bool:
    """Whether a mark on this machine has this key, in JSON, or one with a number."""
    wanted = f'"key": {key}', f'"key": {key[:-1]}@'
    waiting = [os.environ.get("KEDGE_RUNC_STATE") or STATE]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except FileNotFoundError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
                continue
            with open(entry.path, encoding="utf-8", errors="replace") as mark:
                text = mark.read()
            if wanted[0] in text or wanted[1] in text:
                return True
    return False


def _own_name(notes: Mapping[str, str]) -> str:
    """The pod's name, where that is who it is; an error where a controller made it up, and the engine must be asked."""
    name = notes[POD[1]]
    if has_made_up_name(name):
        raise ValueError(name)
    return name


def store_url(environment: Mapping[str, str]) -> str:
    """The store of containers; in a place of this machine when nobody says."""
    state = environment.get("KEDGE_STATE_DIR") or os.environ.get("KEDGE_STATE_DIR") or "/var/lib/kedge"
    return environment.get("KEDGE_STORE") or f"{state}/containers"


def mark_path(root: str, identity: str) -> str:
    """Where it is remembered that a container opted in."""
    return f"{os.environ.get('KEDGE_RUNC_STATE') or STATE}/{root}/{identity}"


def write_mark(path: str, text: str) -> None:
    """Write a mark whole, by rename: another call may read it at any moment."""
    folder, name = os.path.split(path)
    _make_own_folder(folder)
    new = f"{folder}/{name}~{os.getpid()}"  # no container's ID has such a character: nobody takes it for a mark
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    os.rename(new, path)


def _make_own_folder(path: str) -> None:
    """Root's alone, with those above it: os.makedirs would let the umask decide about them."""
    if not os.path.isdir(path):
        _make_own_folder(os.path.dirname(path))
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            pass  # somebody was faster


def _read_spec(json: Connection, text: str) -> dict[str, object]:
    """What opting in looks at: the environment and the annotations, texts all of them."""
    ask = "SELECT key, value, type = 'text' FROM json_each(?, ?)"
    environment = json.execute(ask, (text, "$.process.env")).fetchall()
    annotations = json.execute(ask, (text, "$.annotations")).fetchall()
    if not all(is_text for _, _, is_text in environment + annotations):
        raise ValueError("config.json")
    return {
        "process": {"env": [value for _, value, _ in environment]},
        "annotations": {key: value for key, value, _ in annotations},
    }


def _to_json(json: Connection, value: object) -> str:
    """As Python's json would: the front looks for `"restored": null`."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_to_json(json, name)}: {_to_json(json, item)}" for name, item in value.items()) + "}"
    return str(json.execute("SELECT json_quote(?)", (value,)).fetchone()[0])
