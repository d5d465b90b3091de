"""Finding other programs, also where an ordinary PATH, or a service's, does not look."""

from __future__ import annotations

import os
import shutil

from kedge.errors import Validation

USUAL_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def which(name: str) -> str | None:
    """The absolute path of a program; None when this machine has none of that name."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{USUAL_PATH}")
    return None if found is None else os.path.abspath(found)


def find_program(name: str) -> str:
    """The same; Validation when there is none."""
    found = which(name)
    if found is None:
        raise Validation(f"there is no {name} on this machine", hint="kedge container doctor says how to get it")
    return found
