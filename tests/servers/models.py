"""The model server of the examples, for tests."""

import sys
from pathlib import Path

_EXAMPLES = str(Path(__file__).parents[2] / "examples")
if _EXAMPLES not in sys.path:
    sys.path.append(_EXAMPLES)

from model_server import ModelServer

__all__ = ["ModelServer"]
