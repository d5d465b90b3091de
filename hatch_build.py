"""What a package must contain that the repository does not: `./dev package` makes it and builds both packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SCRIPT = "src/kedge/server/page/static/vendor/htmx.min.js"
SHARE = "deploy/share"


class MadeFiles(BuildHookInterface[Any]):
    """The script of the web page (`./dev assets`), the manual page and the completions (`tools/shell`).

    A source distribution without them is refused. A wheel that somebody builds from a clone for themselves is not: its
    page works, but does not update by itself.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        missing = [path for path in (SCRIPT, SHARE) if not (Path(self.root) / path).exists()]
        if missing and self.target_name == "sdist":
            raise RuntimeError(f"{missing[0]} is missing: build packages with ./dev package")
        if SCRIPT in missing:
            self.app.display_warning("without ./dev assets the page of the service does not update by itself")
        if self.target_name == "wheel" and SHARE not in missing:
            build_data["shared_data"][SHARE] = "share"
