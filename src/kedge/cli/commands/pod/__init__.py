"""`kedge pod`: the table of its commands. A command's module is imported when it is called."""

from __future__ import annotations

from kedge.cli.command import CommandTable

COMMANDS = {
    "list": "List the containers of the pods of this node, and hibernating ones.",
    "checkpoint": "Checkpoint a pod and let it continue.",
    "hibernate": "Checkpoint a pod, end it, and hold it back until it is woken.",
    "wake": "Let a hibernating pod continue at its next start.",
    "guard": "Renew the claims of what runs on this node, as long as this runs.",
}

pod_command = CommandTable(
    "pod",
    __name__,
    {"Commands": COMMANDS},
    text="Checkpoint, hibernate and wake Kubernetes pods, on their node.\n\n"
    "Finds pods through the engine's socket (CRI). Checkpoints of opted-in containers go to the store of their "
    "engine, unless --store names another one. Needs root.",
)
