"""What every child needs, imported once by the server they are forked from."""

import importlib
from contextlib import suppress

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

for name in ("cryptography.hazmat.primitives.ciphers.aead", "httpx2", "obstore.store", "psycopg", "psycopg_pool"):
    with suppress(ImportError):  # whoever needs one that is missing says so
        importlib.import_module(name)
for name in ("operations", "worker"):
    importlib.import_module(f"tests.torture.histories.{name}")
