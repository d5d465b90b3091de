"""What every child needs, imported once by the server they are forked from."""

import numpy  # noqa: F401

import holdfast
import holdfast.diff
import holdfast.gc
import holdfast.verify
from holdfast.blobs import packs
from holdfast.index import sqlite

from . import children, mutants

__all__ = ["children", "holdfast", "mutants", "packs", "sqlite"]
