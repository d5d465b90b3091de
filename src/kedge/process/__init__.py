"""Objects that save themselves, and workflows with human approvals."""

from __future__ import annotations

from .workflow import Workflows

__all__ = ["Workflows"]
