"""The images of a checkpoint as files; those with memory pages while the runtime and CRIU already begin to restore.

To read, verify and write the pages takes about as long as CRIU needs for namespaces and network. So it is started with
all other images, and a hook of the runtime holds it back until the pages are there. They get the names by which CRIU
finds them only when all of them are verified (I2): should it not be held back, or should we be killed, it finds none
and gives up, before anything runs.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kedge.blobs.workers import start
from kedge.errors import storage_errors
from kedge.files import Tree

from .attempts import Attempt
from .programs import which

_PAGES = "pages-"
_LEAST_BYTES = 4 << 20  # of pages; less is written sooner than a hook has started
_MOST_OTHER_BYTES = 16 << 20  # these are written twice


class _GivenUp(Exception):
    """Nobody waits for the pages any more."""


class PageWriter:
    """The files with pages that are being written, if any."""

    def __init__(self, images: Tree, attempt: Attempt) -> None:
        self._images = images
        self._attempt = attempt
        self._waiting: dict[str, int] = {}  # files that are still to come, with their sizes
        self._gate = Path()
        self._error: BaseException | None = None
        self._is_given_up = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Write all other images, and go on with the pages in a thread."""
        entries = self._images.entries
        pages = {entry.path: entry.size_bytes for entry in entries if entry.path.startswith(_PAGES)}
        others = [entry for entry in entries if entry.path not in pages]
        is_flat = all(entry.kind == "file" and "/" not in entry.path for entry in entries)
        other_bytes = sum(entry.size_bytes for entry in others)
        if not is_flat or sum(pages.values()) < _LEAST_BYTES or other_bytes > _MOST_OTHER_BYTES:
            self._attempt.images.rmdir()
            self._images.write_to(self._attempt.images, durable=False)
            return
        self._waiting = pages
        self._gate = self._attempt.images / "gate"
        with storage_errors("write", self._gate):
            gate = os.open(self._gate, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(gate, fcntl.LOCK_EX)
        self._thread = threading.Thread(target=self._write, args=(gate,), name="kedge-pages", daemon=True)
        try:
            start(self._thread)
        except BaseException:
            os.close(gate)
            raise
        for entry in others:
            image = self._attempt.images / entry.path
            with storage_errors("write", image):
                image.write_bytes(self._images.read(entry.path))

    @property
    def sizes(self) -> dict[str, int]:
        """The files that may not be there yet, and what they will be."""
        return dict(self._waiting)

    def hook(self) -> dict[str, object] | None:
        """A hook of an OCI configuration that waits for the pages; None where there is nothing to wait for.

        One that stays in a configuration, because we are killed, finds nobody to wait for and does no harm.
        """
        flock = which("flock")
        if not self._waiting or flock is None:
            return None
        return {"path": "/bin/sh", "args": ["sh", "-c", '"$1" --shared "$0" true || true', str(self._gate), flock],
                "env": [f"PATH={os.environ.get('PATH', '')}"]}  # fmt: skip

    def wait(self) -> None:
        """Until all pages are verified and have their names; raises what kept them from it."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Write no more of them. When this returns, nothing is being written."""
        self._is_given_up = True
        if self._thread is not None:
            self._thread.join()

    def _write(self, gate: int) -> None:
        verified = self._attempt.images / "verified"
        try:
            self._images.write_to(verified, durable=False, progress=self._go_on)
            with storage_errors("move", verified):
                for name in self._waiting:
                    os.rename(verified / name, self._attempt.images / name)
        except BaseException as error:  # noqa: BLE001 - raised where the pages are waited for
            self._error = error
        finally:
            os.close(gate)  # nobody is held back any more

    def _go_on(self, *_: int) -> None:
        if self._is_given_up:
            raise _GivenUp


@contextmanager
def written_images(images: Tree, attempt: Attempt) -> Iterator[PageWriter]:
    """The images in the attempt's folder, its pages perhaps still on their way."""
    writer = PageWriter(images, attempt)
    try:
        writer.begin()
        yield writer
    finally:
        writer.give_up()
