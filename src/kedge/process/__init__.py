"""Objects that save themselves, and workflows with people in them."""

from __future__ import annotations

from .workflow import Workflows

__all__ = ["Workflows"]
