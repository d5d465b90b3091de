"""What every child needs, imported once by the server they are forked from."""

import numpy  # noqa: F401

import holdfast.codec
import holdfast.diff
import holdfast.embedded
import holdfast.gc
import holdfast.manager
import holdfast.retention
import holdfast.verify

from . import bitflips, children, crash_states, many_processes, mutants, syscalls

__all__ = ["bitflips", "children", "crash_states", "holdfast", "many_processes", "mutants", "syscalls"]
