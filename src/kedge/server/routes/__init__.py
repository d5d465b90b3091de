"""The routes, one file per noun."""

from __future__ import annotations

from kedge.server.problems import MEDIA_TYPE

API = "/api/v1"
PROBLEMS: dict[int | str, dict[str, object]] = {
    "default": {
        "description": "What went wrong.",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}
