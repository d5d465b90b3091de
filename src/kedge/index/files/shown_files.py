"""The readable files of a `files:` store: <dir>/<job>/<level>/<id>.json, other namespaces below <dir>/@<namespace>.

A file is written in two steps, before and after the journal's: as a draft, which takes all the space it needs, and by a
rename afterwards. So a save that does not fit is refused before anything says that it exists. One that the journal has
is never refused because of its file. All of it happens under the journal's lock. A draft found under that lock was
left by a killed writer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from kedge.blobs.direct import sync_directory
from kedge.blobs.group_files import make_folder
from kedge.errors import storage_errors

from .journal import draft_file

INSIDE = ".kedge"  # the directory whose name no job can have
DEFAULT = "default"
_DRAFT = re.compile(r"\.(.+\.json|journal)\.\d+\.new")

Drafts = Mapping[Path, Path | None]  # the draft of each file; None to remove the file


class ShownFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path_of(self, namespace: str, job: str, level: str, checkpoint_id: str) -> Path:
        """Return the path of a file. Names cannot contain slashes or leading dots; anything else is percent-encoded."""
        base = self._folder if namespace == DEFAULT else self._folder / f"@{_safe(namespace)}"
        return base / _safe(job) / _safe(level) / f"{_safe(checkpoint_id)}.json"

    def draft(self, path: Path, data: bytes) -> Path:
        """Write the new content of a file durably beside it."""
        with storage_errors("write", path):
            if not path.parent.is_dir():
                make_folder(path.parent)
                for folder in (path.parent.parent, path.parent.parent.parent, self._folder):
                    sync_directory(folder)
        return draft_file(path, data)

    def discard(self, drafts: Drafts) -> None:
        for draft in drafts.values():
            if draft is not None:
                _remove(draft)

    def place(self, drafts: Drafts) -> None:
        """Move the drafts to their places, and remove the files without one."""
        for path, draft in drafts.items():
            if draft is None:
                _remove(path)
                continue
            with storage_errors("write", path):
                os.replace(draft, path)
                sync_directory(path.parent)

    def present(self) -> set[Path]:
        """Return the existing files, and remove drafts of killed writers."""
        files = set()
        with storage_errors("read", self._folder):
            for place, folders, names in os.walk(self._folder):
                if Path(place) == self._folder / INSIDE:
                    folders.clear()
                for name in names:
                    path = Path(place, name)
                    if _DRAFT.fullmatch(name):
                        path.unlink(missing_ok=True)
                    elif name.endswith(".json") and INSIDE not in path.parts:
                        files.add(path)
        return files

    def remove_strays(self, paths: set[Path]) -> None:
        """Remove files of deleted checkpoints; other people's files stay."""
        for path in paths:
            if self._is_ours(path):
                _remove(path)

    def _is_ours(self, path: Path) -> bool:
        depth = len(path.relative_to(self._folder).parts)
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError):
            return False
        return depth in (3, 4) and isinstance(document, dict) and f"{_safe(str(document.get('id')))}.json" == path.name


def _safe(name: str) -> str:
    text = quote(name, safe=":@+")
    return text if not text.startswith(".") else "%2E" + text[1:]


def _remove(path: Path) -> None:
    with storage_errors("remove", path):
        path.unlink(missing_ok=True)
