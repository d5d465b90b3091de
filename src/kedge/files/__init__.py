"""Files and directories as values of a state: `cm.save("job", "step", {"data": Tree("dir"), "log": File("x.log")})`.

scan      what is on disk, without reading it          ──┐
table     the entries, as columns                        ├─ save
content   the bytes of all files, as one stream        ──┘
stored    table and content in a store, read on demand ──┐
restore   back to disk, staged, whole and durable        ├─ load
output    the staging, in parallel                     ──┘
"""

from .changes import TreeChange, diff_trees
from .table import FileEntry
from .tree import File, FilesSummary, Tree, summaries_in

__all__ = ["File", "FileEntry", "FilesSummary", "Tree", "TreeChange", "diff_trees", "summaries_in"]
