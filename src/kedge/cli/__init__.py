"""The command line: `kedge COMMAND`. One file for each command; each imports what it needs when it runs."""

import gc

gc.set_threshold(50_000)  # importing makes many objects and no garbage: looking for some took a twentieth of a command

from .app import cli, main  # noqa: E402

__all__ = ["cli", "main"]
