"""The routes, one file per noun."""

from __future__ import annotations

from typing import Any

from kedge.server.problems import MEDIA_TYPE

API = "/api/v1"
PROBLEMS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "What went wrong.",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}
