"""The command line: `holdfast COMMAND`. One file per group of commands; each imports what it needs when it runs."""

from .app import cli, main

__all__ = ["cli", "main"]
