"""`kedge container`: the table of its commands. A command's module is imported when it is called."""

from __future__ import annotations

from kedge.cli.command import CommandTable, remember

COMMANDS = {
    "checkpoint": "Checkpoint a container.",
    "restore": "Restore a container.",
    "list": "List checkpoints of containers.",
    "inspect": "Show what is in a checkpoint, or in an archive of any engine.",
    "export": "Write a checkpoint as an archive of podman, CRI-O, containerd, or an image.",
    "import": "Save an archive of another engine as a checkpoint.",
    "preflight": "Check whether a container can be checkpointed, and restored elsewhere.",
    "doctor": "Check what this machine can do, and how to add the rest.",
    "logs": "Show the log of an attempt, and what it means.",
}


def _adopt_store(store: str | None, namespace: str | None, store_key: str | None, as_json: bool) -> None:
    from kedge.containers.runtime import settings

    settings.adopt_store()
    remember(store, namespace, store_key, as_json)


container_command = CommandTable(
    "container",
    __name__,
    {"Commands": COMMANDS},
    callback=_adopt_store,
    text="Checkpoint a running container, with processes and files from the same moment, and restore it here or "
    "elsewhere.\n\n"
    "Needs root, runc (by itself or under containerd, Docker or podman) and CRIU; kedge container doctor says what is "
    "missing. The default store is the one that /etc/kedge/runc.env names for this machine's engines, if there is one.",
)
