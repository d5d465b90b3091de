"""The job of `kedge demo`: a plate heated by two moving flames, which saves a checkpoint after every step.

    python -m kedge.cli.demo_job STORE JOB STEPS PAUSE_S

Whoever starts it again with the same command gets the same result, however often it was killed. It tells what it does
on stdout, in lines of JSON, and needs nothing beyond Kedge's own dependencies.
"""

from __future__ import annotations

import json
import math
import sys
import time
from array import array
from hashlib import sha256
from typing import Any

from kedge.manager import CheckpointManager

WIDTH, HEIGHT = 72, 32
SUBSTEPS = 6
Plate = list[list[float]]


def cold_plate() -> Plate:
    return [[0.0] * WIDTH for _ in range(HEIGHT)]


def advance(plate: Plate, step: int) -> Plate:
    """The plate one step later. The same step of the same plate gives the same numbers, bit for bit."""
    for part in range(SUBSTEPS):
        at = step + part / SUBSTEPS
        for speed, phase, heat in ((0.19, 0.0, 1.0), (-0.13, 2.1, 0.8)):
            x = round((0.5 + 0.42 * math.cos(speed * at + phase)) * (WIDTH - 1))
            y = round((0.5 + 0.38 * math.sin(1.7 * speed * at + phase)) * (HEIGHT - 1))
            for dx, dy in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
                plate[(y + dy) % HEIGHT][(x + dx) % WIDTH] = heat
        rows = []
        for y, row in enumerate(plate):
            above, below = plate[max(y - 1, 0)], plate[min(y + 1, HEIGHT - 1)]
            left, right = [row[0], *row], [*row[1:], row[-1]]
            cells = zip(row, above, below, left, right, strict=False)
            rows.append([0.997 * (c + 0.2 * (a + b + w + e - 4 * c)) for c, a, b, w, e in cells])
        plate = rows
    return plate


def to_bytes(plate: Plate) -> bytes:
    return array("d", (cell for row in plate for cell in row)).tobytes()


def from_bytes(data: bytes) -> Plate:
    cells = array("d", data)
    return [list(cells[y * WIDTH : (y + 1) * WIDTH]) for y in range(HEIGHT)]


def digest_of(plate: Plate) -> str:
    return sha256(to_bytes(plate)).hexdigest()


def expected_digest(steps: int) -> str:
    """That of the plate after a run without interruption."""
    plate = cold_plate()
    for step in range(1, steps + 1):
        plate = advance(plate, step)
    return digest_of(plate)


def to_state(plate: Plate, step: int, energies: list[float]) -> dict[str, object]:
    """What is saved: small facts, a growing list, and the plate as an array (bytes where numpy is not installed)."""
    data: object = to_bytes(plate)
    try:
        import numpy
    except ImportError:
        pass
    else:
        data = numpy.frombuffer(to_bytes(plate)).reshape(HEIGHT, WIDTH)
    return {"step": step, "energies": energies, "hottest": max(map(max, plate)), "plate": data}


def work(store: str, job: str, steps: int, pause_s: float) -> None:
    """Resume after the newest checkpoint, save after every step, say what happens on stdout."""
    with CheckpointManager(store) as manager:
        plate, first, energies = cold_plate(), 1, []
        latest = manager.load_latest(job)
        if latest is not None:
            state: Any = latest[1]
            plate, first, energies = from_bytes(bytes(state["plate"])), state["step"] + 1, state["energies"]
        _say(what="started", step=first - 1, checkpoint=latest[0].id if latest else None)
        for step in range(first, steps + 1):
            plate = advance(plate, step)
            energies.append(round(sum(map(sum, plate)), 3))
            _say(what="saving", step=step)
            began = time.perf_counter()
            state = to_state(plate, step, energies)
            saved = manager.save(job, f"step {step}", state, metadata={"energy": energies[-1]})
            ms = 1000 * (time.perf_counter() - began)
            _say(what="saved", step=step, checkpoint=saved, ms=ms, picture=_picture(plate))
            time.sleep(pause_s)
        _say(what="finished", step=steps, digest=digest_of(plate))


def _say(**news: object) -> None:
    print(json.dumps(news), flush=True)


def _picture(plate: Plate) -> str:
    return bytes(min(255, int(cell * 255)) for row in plate for cell in row).hex()


if __name__ == "__main__":
    store, job, steps, pause_s = sys.argv[1:]
    work(store, job, int(steps), float(pause_s))
