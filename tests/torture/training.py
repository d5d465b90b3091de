"""Training killed at random moments: it ends with the same bits as a run that nobody disturbed.

The processes are forks of one that has torch imported, and computes nothing itself: threads do not survive a fork.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "training.py"


def kill_training(
    folder: Path, *, kills: int, seed: int, steps: int = 150, by_saves: bool = False, until: float = float("inf")
) -> dict[str, float]:
    example = _example()
    example.torch.set_num_threads(1)
    example.torch.optim.AdamW([example.torch.zeros(1)])  # imports for seconds, which the children need not
    rnd = random.Random(seed)
    start = time.monotonic()
    expected = _run(example, steps, folder / "whole", folder / "whole.txt", None)
    whole_s = time.monotonic() - start
    killed = runs = 0
    while killed < kills and time.monotonic() < until:
        store, answer = folder / f"store-{runs}", folder / f"answer-{runs}.txt"
        while True:
            saves = rnd.randint(1, 4) if by_saves else 0
            after_s = 0.01 * rnd.random() if by_saves else rnd.uniform(0, whole_s)
            found = _run(example, steps, store, answer, after_s if killed < kills else None, saves)
            if found is not None:
                break
            killed += 1
        assert found == expected, f"run {runs} ended with other bits after {killed} kills"
        runs += 1
    return {"kills": killed, "runs": runs}


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("training_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def _run(example: Any, steps: int, store: Path, answer: Path, kill_after_s: float | None, saves: int = 0) -> str | None:
    """The digest a child ended with; None when it was killed: after so many saves, or just after a time."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if saves:
                _tell_saves(example, writer)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            answer.write_text(example.train(store, steps))
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    os.close(writer)
    for _ in range(saves if kill_after_s is not None else 0):
        os.read(reader, 1)
    os.close(reader)
    if kill_after_s is not None:
        time.sleep(kill_after_s)  # sleep: to be killed at any moment
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None
    assert os.WEXITSTATUS(status) == 0, "the training failed"
    return answer.read_text()


def _tell_saves(example: Any, pipe: int) -> None:
    """In the child: a byte down the pipe for each save that is durable."""
    make = example.make

    def made(store: Path) -> Any:
        training = make(store)
        training.manager.watch(lambda *_: _tell(pipe))
        return training

    example.make = made


def _tell(pipe: int) -> None:
    try:
        os.write(pipe, b".")
    except BrokenPipeError:
        pass  # nobody counts any more


def torture(minutes: float, folder: Path) -> dict[str, float]:
    return kill_training(folder, kills=200, seed=time.time_ns(), until=time.monotonic() + 60 * minutes)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        count, start, length = map(int, sys.argv[1:])
        print(kill_training(Path(place), kills=count, seed=start, steps=length, by_saves=True))
