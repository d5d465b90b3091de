"""What every child needs, imported once by the server they are forked from."""

import importlib
from contextlib import suppress

import numpy  # noqa: F401

import kedge.care.gc
import kedge.care.retention
import kedge.care.verify
import kedge.codec
import kedge.diff
import kedge.manager
import kedge.store.directory

from . import bitflips, children, crash_states, many_processes, mutants, syscalls

__all__ = ["bitflips", "children", "crash_states", "kedge", "many_processes", "mutants", "syscalls"]

for name in ("cryptography.hazmat.primitives.ciphers.aead", "httpx2", "obstore.store", "psycopg", "psycopg_pool"):
    with suppress(ImportError):  # whoever needs one that is missing says so
        importlib.import_module(name)
for name in ("operations", "worker"):
    importlib.import_module(f"tests.torture.histories.{name}")
