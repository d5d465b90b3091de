"""kill -9 at random writes while keys are changed: all stays readable, under one key, and the next call goes on."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kedge
from kedge.errors import Validation
from tests.servers.postgres import postgres_cluster

from .children import Child, Report
from .ledger import Violation, unrefused

_WRITES = ("set_keyring", "reseal", "sweep", "scrub")  # of the index; packs are made durable by their writers
_MOST_WRITES = 16  # about as many as it takes to rewrite ten states


def change(
    report: Report, connection: Any, place: str, key: bytes, new_key: bytes | None, rewrites: bool, death: int
) -> None:
    """Change the master key, the data key, or both; the process kills itself before or after a write of its own."""
    with kedge.open(place, key=key) as store:
        _die_at(store, *divmod(death, 2))
        store.rekey(new_key, rewrite=rewrites)
    report("changed")


def _die_at(store: kedge.CheckpointManager, count: int, is_behind: int) -> None:
    written = [-1]

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **options: Any) -> Any:
            written[0] += 1
            if written[0] == count and not is_behind:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = real(*args, **options)
            if written[0] == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return write

    index: Any = store.store.index.inner  # type: ignore[attr-defined]
    for name in _WRITES:
        setattr(index, name, deadly(getattr(index, name)))
    blobs: Any = store.store.blobs
    begin = blobs.writer

    def writer(size_hint: int) -> Any:
        begun = begin(size_hint)
        begun.commit = deadly(begun.commit)
        return begun

    blobs.writer = writer


def fill(place: str, key: bytes, draw: random.Random) -> dict[str, object]:
    """States in rows, in packs, and such as share chunks; by ID."""
    shared = draw.randbytes(1_200_000)
    values: list[object] = [
        {"n": 1},
        {"a": shared},
        {"b": shared, "c": 1},
        draw.randbytes(100_000),
        list(range(20_000)),
    ]
    with kedge.open(place, key=key) as store:
        return {store.save("job", "step", value): value for value in values}


def kill_rekeys(place: str, *, rounds: int, seconds: float = 1e9, seed: int = 1, mutant: str = "") -> dict[str, float]:
    """One change of keys after another, each killed at a write; between them the store is used as ever."""
    draw = random.Random(f"rekey {seed}")
    key, kills, changed, loaded = draw.randbytes(32), 0, 0, 0
    states = fill(place, key, draw)
    end = time.monotonic() + seconds
    for round_ in range(rounds):
        if time.monotonic() > end:
            break
        new_key, rewrites = draw.choice([(None, True), (draw.randbytes(32), True), (draw.randbytes(32), False)])
        death = draw.randrange(2 * _MOST_WRITES if rewrites else 2)
        is_killed = Child(change, place, key, new_key, rewrites, death, mutant=mutant).drain() != 0
        kills, changed = kills + is_killed, changed + (not is_killed)
        with unrefused(f"round {round_}, seed {seed}"):
            key = _key_of(place, [key] if new_key is None else [key, new_key])
            with kedge.open(place, key=key) as store:
                between = draw.randbytes(90_000)
                states[store.save("job", "between", between)] = between
                loaded += _check(store, states)
                if draw.random() < 0.5:
                    store.gc()
                    loaded += _check(store, states)
                while len(states) > 10:
                    oldest = next(iter(states))
                    store.delete("job", oldest)
                    del states[oldest]
    with unrefused(f"at the end, seed {seed}"), kedge.open(place, key=key) as store:
        if store.rekey(rewrite=True).unreadable or (store.encryption or {})["old_data_keys"]:
            raise Violation("a change of keys that nobody killed is not complete")
        store.gc()
        loaded += _check(store, states)
    return {"kills": kills, "changes finished": changed + 1, "states compared": loaded, "lost": 0}


def _key_of(place: str, keys: list[bytes]) -> bytes:
    """The one under which the store is; a killed change has left it under the old one or the new one."""
    fitting = []
    for key in keys:
        try:
            kedge.open(place, key=key, create=False).close()
        except Validation:
            continue
        fitting.append(key)
    if len(fitting) != 1:
        raise Violation(f"{len(fitting)} of {len(keys)} keys open the store")
    return fitting[0]


def _check(store: kedge.CheckpointManager, states: dict[str, object]) -> int:
    lost = [i for i, state in states.items() if store.load(i) != state]
    problems = store.verify().problems
    if lost or problems:
        raise Violation(f"{lost} are not what was saved, {problems}")
    return len(states)


def torture(minutes: float, folder: Path) -> dict[str, float]:
    numbers = kill_rekeys(str(folder / "store"), rounds=10**9, seconds=minutes * 30, seed=time.time_ns())
    with postgres_cluster() as cluster:
        url = cluster.empty_database()
        there = kill_rekeys(url, rounds=10**9, seconds=minutes * 30, seed=time.time_ns())
    return {name: count + there[name] for name, count in numbers.items()}
