"""Old pickles, read without trust: in a child (`old_pickle_child`) that can neither run, reach nor write anything.

Nothing a pickle names is imported. Builtin types, dates, collections, paths, decimals, UUIDs and numpy arrays are
rebuilt. Objects of any other class become dictionaries that name it, and are reported, unless the class is one that the
old systems pickled or is given with --allow.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from typing import IO, Any, NamedTuple, Self

import ormsgpack

from kedge import codec
from kedge.errors import CheckpointError, Unavailable, Validation

from .common import Finding, Unreadable, Verdict, clean
from .old_pickle_child import FAILED, HEAD, OK

MAX_PICKLE_BYTES = 256 << 20
MAX_ANSWER_BYTES = 1 << 30
WALL_S = 120.0


def parse_allowed(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names as `--allow` takes them: module.Class. Of a pickle they are never imported, only no longer reported."""
    for name in names:
        module, _, cls = name.rpartition(".")
        if not module or not cls.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise Validation(f"--allow {clean(name)}: not the name of a class", hint="write it as module.Class")
    return names


# Isolated from the environment, the current directory and the user's own packages; where ours are is told, last.
_START = "import sys; sys.path += sys.argv[1:]; from kedge.legacy.importers.old_pickle_child import serve; serve()"


def _library_paths() -> list[str]:
    here = os.getcwd()
    return [path for path in sys.path if os.path.isabs(path) and path != here]


class Unpickled(NamedTuple):
    """The value of a pickle, and the classes in it that nobody expected: their objects are dictionaries."""

    value: Any
    unknown: tuple[str, ...]

    def finding(self, source: str) -> Finding | None:
        """What the report says of it."""
        if not self.unknown:
            return None
        names = ", ".join(self.unknown)
        return Finding(
            Verdict.LOSSY, source, f"objects of {names} are dictionaries now: their class is under the key $class"
        )


class Pickles:
    """The child, started when the first pickle comes, and again after one that was too much for it."""

    def __init__(self, allow: tuple[str, ...] = (), *, wall_s: float = WALL_S) -> None:
        self._allow = parse_allowed(allow)
        self._wall_s = wall_s
        self._child: subprocess.Popen[bytes] | None = None

    def read(self, data: bytes) -> Unpickled:
        """The value of a pickle, gzipped or not; Unreadable says why there is none."""
        if not data:
            raise Unreadable("empty")
        child = self._started()
        try:
            self._send(child, data)
            status, answer = self._receive(child)
        except (OSError, EOFError, TimeoutError) as error:
            too_long = isinstance(error, TimeoutError)
            self.close()
            raise Unreadable(
                f"reading it took more than {self._wall_s:g} s"
                if too_long
                else "reading it took too much memory or time"
            ) from None
        if status == FAILED:
            raise Unreadable(clean(answer.decode("utf-8", "replace")))
        tree, buffers, names = ormsgpack.unpackb(answer)
        try:
            value = codec.decode(tree, lambda number: memoryview(buffers[number]))
        except CheckpointError as error:
            raise Unreadable(clean(error.message)) from error
        return Unpickled(value, tuple(clean(name, 200) for name in names))

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.close()
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, *_library_paths()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                cwd="/",
            )
            self._send(self._child, json.dumps(self._allow).encode())
            status, answer = self._receive(self._child)
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise Unavailable(
                "the process that reads pickles could not start", hint="is there enough memory? see kedge doctor"
            ) from error
        if status != OK:
            raise Unavailable(f"pickles cannot be read safely here: {clean(answer.decode())}", hint="use Linux")
        return self._child

    def _send(self, child: subprocess.Popen[bytes], data: bytes) -> None:
        pipe = _pipe(child.stdin)
        pipe.write(HEAD.pack(0, len(data)))
        pipe.write(data)
        pipe.flush()

    def _receive(self, child: subprocess.Popen[bytes]) -> tuple[int, bytes]:
        until = time.monotonic() + self._wall_s
        status, size = HEAD.unpack(self._bytes(child, HEAD.size, until))
        if size > MAX_ANSWER_BYTES:
            raise EOFError
        return status, self._bytes(child, size, until)

    def _bytes(self, child: subprocess.Popen[bytes], size: int, until: float) -> bytes:
        handle = _pipe(child.stdout).fileno()
        data = bytearray()
        while len(data) < size:
            left_s = until - time.monotonic()
            if left_s <= 0 or not select.select([handle], [], [], left_s)[0]:
                raise TimeoutError
            part = os.read(handle, min(1 << 20, size - len(data)))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def close(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            try:
                _pipe(pipe).close()
            except OSError:
                pass  # what it had not read yet
        child.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
