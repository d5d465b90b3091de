"""No restore gives a container more than its new configuration does.

The processes get their users, capabilities and confinement from the images, whatever the securityContext of the new pod
says. So every thread in the images is compared with the configuration, and a restore that would give more is refused.
The content of a seccomp filter cannot be compared: that there is one is all that is known. Whoever writes images below
the directories of KEDGE_RESTORE_ROOTS, or into the store, is trusted as far as that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kedge.errors import Conflict

from .criu import rights
from .criu.rights import Rights

# The numbers of capabilities are their places here (capability.h).
_CAPABILITIES = """
CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE
NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN
SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE
MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE
""".split()  # noqa: SIM905 - one per line would take a page
_SETGID, _SETUID = _CAPABILITIES.index("SETGID"), _CAPABILITIES.index("SETUID")


def refuse_more(images: str | os.PathLike[str], spec: Mapping[str, object]) -> None:
    """Conflict when a thread in the images may do more than the configuration of the container allows."""
    threads = list(rights.rights(images))
    for thread in threads:
        for excess in _excess(thread, spec):
            raise _refusal(f"thread {thread.thread} {excess}")
    if len({thread.user_namespace for thread in threads} - {None}) > 1:
        raise _refusal("its threads are in several user namespaces")
    _refuse_other_users(rights.user_maps(images), spec)


def confinement(spec: Mapping[str, object]) -> list[str]:
    """What a runtime's restore must be told so that SELinux confines the processes as the configuration says: the
    label of each pod is another one."""
    label = _process(spec).get("selinuxLabel")
    return [f"--lsm-profile=selinux:{label}"] if label else []


def _excess(thread: Rights, spec: Mapping[str, object]) -> Iterator[str]:
    process = _process(spec)
    user = process.get("user") or {}
    sets = process.get("capabilities") or {}
    is_final = bool(process.get("noNewPrivileges"))
    bounding = _numbers(sets.get("bounding"))
    # Root has what is in the bounding set, and so does who may run programs that make him root.
    can_gain = not is_final or user.get("uid", 0) == 0
    active = _numbers(sets.get("ambient")) | (bounding | _numbers(sets.get("permitted")) if can_gain else frozenset())
    if more := (thread.active - active) | (thread.bounding - bounding):
        yield f"has capabilities that the container is not given: {', '.join(sorted(map(_name, more)))}"
    if is_final and not thread.has_no_new_privileges:
        yield "could get new privileges, and the container must not"
    if is_final and _SETUID not in active and (more := thread.users - {user.get("uid", 0)}):
        yield f"is user {min(more)}, and the container is user {user.get('uid', 0)}"
    groups = {user.get("gid", 0), *(user.get("additionalGids") or ())}
    if is_final and _SETGID not in active and (more := thread.groups - groups):
        yield f"is in group {min(more)}, and the container is not"
    if _linux(spec).get("seccomp") and not thread.is_filtered:
        yield "is confined by no seccomp filter, and the container is to be"
    profile = process.get("apparmorProfile") or ""
    if profile not in ("", "unconfined") and thread.label.removeprefix("apparmor:") != profile:
        yield f"has the AppArmor profile {thread.label or 'unconfined'}, and the container has {profile}"
    if process.get("selinuxLabel") and not thread.label:
        yield "has no label of SELinux, and the container has one"


def _refuse_other_users(
    maps: tuple[list[rights.Mapping], list[rights.Mapping]] | None, spec: Mapping[str, object]
) -> None:
    linux = _linux(spec)
    has_own = any(entry.get("type") == "user" for entry in linux.get("namespaces") or ())
    if has_own != (maps is not None):
        raise _refusal("only one of container and checkpoint has its own user namespace")
    for lines, name in zip(maps or (), ("uidMappings", "gidMappings"), strict=False):
        allowed = [
            rights.Mapping(int(line["containerID"]), int(line["hostID"]), int(line["size"]))
            for line in linux.get(name) or ()
        ]
        if allowed and lines != allowed:
            raise _refusal(f"its user namespace has other {name} than the container")


def _process(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    return spec.get("process") or {}


def _linux(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    return spec.get("linux") or {}


def _numbers(names: Sequence[str] | None) -> frozenset[int]:
    plain = (name.upper().removeprefix("CAP_") for name in names or ())
    return frozenset(_CAPABILITIES.index(name) for name in plain if name in _CAPABILITIES)


def _name(number: int) -> str:
    return f"CAP_{_CAPABILITIES[number]}" if number < len(_CAPABILITIES) else f"capability {number}"


def _refusal(what: str) -> Conflict:
    return Conflict(
        f"the checkpoint would give the container more than its configuration: {what}",
        hint="restore it with the securityContext that it was checkpointed with",
    )
