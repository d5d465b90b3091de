"""Functions that tests send to other processes, in a module that is quickly imported there."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Noted:
    """A picklable function whose calls are lines of a file, from whatever process."""

    def __init__(self, file: Path, function: Callable[[Any], Any]) -> None:
        self.file = str(file)
        self.function = function

    def __call__(self, item: Any) -> Any:
        with open(self.file, "a") as log:
            log.write(f"{item}\n")
        return self.function(item)

    def calls(self) -> list[str]:
        return Path(self.file).read_text().split() if os.path.exists(self.file) else []


def double(item: Any) -> Any:
    return item * 2


def text(item: Any) -> str:
    return str(item)


def fail_on_odd(item: int) -> int:
    if item % 2:
        raise ValueError(f"odd: {item}")
    return item


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("needs two arguments")
        self.first = a
        self.response = open  # as vendors do: something that cannot be kept

    def __str__(self) -> str:
        return f"{self.args[0]}{'' if callable(self.response) else '?'}"


def fail_unpicklably(item: int) -> int:
    raise Unpicklable(item, item)


class LocalErrors:
    """A class that another program finds under no name."""

    @staticmethod
    def fail(file: str) -> None:
        class Busy(OSError):
            pass

        with open(file, "a") as log:
            log.write("call\n")
        raise Busy("not now")


def die_at_7(item: int) -> int:
    if item == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


def hang_at_3(item: int) -> int:
    if item == 3:
        time.sleep(60)  # sleep: it hangs until it is killed
    return item


def own_pid() -> int:
    return os.getpid()


def hang(file: str) -> None:
    """Say which process this is, and never come back."""
    part = Path(file + ".part")
    part.write_text(f"{os.getpid()}")
    part.rename(file)
    time.sleep(600)  # sleep: it hangs until it is killed


def die() -> None:
    os._exit(3)


class DieOnce:
    """Kills its process the first time it meets `item`; otherwise notes each item when it is done."""

    def __init__(self, folder: Path, item: int) -> None:
        self.folder = str(folder)
        self.item = item

    def __call__(self, item: int) -> int:
        flag = Path(self.folder, "died")
        if item == self.item and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.06)  # sleep: at least longer than items that share a record
        with open(Path(self.folder, "calls"), "a") as log:
            log.write(f"{item}\n")
        return item * 2

    def calls(self) -> list[int]:
        return sorted(map(int, Path(self.folder, "calls").read_text().split()))
