"""Opting in: how a container asks `kedge-runc` for checkpoints, in its environment or its annotations.

    KEDGE_CHECKPOINT=1         kedge.dev/checkpoint: "1"     checkpoint it when it is asked to stop
    KEDGE_RESTORE=latest|ID|no kedge.dev/restore             where it begins; latest, if there is one, by default;
                                                                   or a path below a directory opened for that (placed)
    KEDGE_WORKLOAD=name        kedge.dev/key                 which workload it is; in Kubernetes not needed
    KEDGE_POLICY=fresh|fail|retry:N  kedge.dev/policy        what to do when it cannot be restored
    KEDGE_KEEP=until-success   kedge.dev/keep                forget it when it ends by itself with status 0
    KEDGE_TCP=close|keep       kedge.dev/tcp                 open connections in a restore; close, by default, as the
                                                                   next container mostly has another address
    KEDGE_WAIT=SECONDS         kedge.dev/wait                for a pod it may replace, before it begins anew beside it
    KEDGE_VOLUMES=yes|no       kedge.dev/volumes             whether its emptyDir volumes are saved with it; yes

KEDGE_TCP and KEDGE_VOLUMES mean the same in the machine's /etc/kedge/runc.env, for containers that do not say.

RESTORE_FROM and kybernate.io/restore-from, of an older system, mean KEDGE_RESTORE. ARCH_ENABLE=1, of another, means
KEDGE_CHECKPOINT=1 as it was there: without a name, the workload is the container's ID in the namespace of its engine;
it begins with what ARCH left; a success ends it. The place of the store is the machine's business and never the
container's: whoever writes a pod must not choose files of the host.
"""

from __future__ import annotations

TYPE_CHECKING = False  # see `early`: what is imported here, every container that opted in waits for
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from kedge.errors import Validation

    # The annotations of a container that is given no key → the name of its pod's owner, or of the pod.
    Owner = Callable[[Mapping[str, str]], str]

POD = ("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name", "io.kubernetes.cri.container-name")
SANDBOX = "io.kubernetes.cri.sandbox-id"
UID = "io.kubernetes.cri.sandbox-uid"  # of the pod; containerd 1.6 does not tell it
_TYPE = "io.kubernetes.cri.container-type"
_MANAGER = "io.container.manager"
# What CRI-O calls the same. It writes these after the annotations of the pod, whose author cannot forge them.
_OF_CRIO = {
    "io.kubernetes.pod.namespace": POD[0],
    "io.kubernetes.pod.name": POD[1],
    "io.kubernetes.pod.uid": UID,
    "io.kubernetes.container.name": POD[2],
    "io.kubernetes.cri-o.SandboxID": SANDBOX,
    "io.kubernetes.cri-o.ContainerType": _TYPE,
}
_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
_PLAIN = _LETTERS | set("._-")
_DRAWN = frozenset("bcdfghjklmnpqrstvwxz2456789")
_YES = ("1", "yes", "true", "on")
_MOST_WAIT_S = 60  # a kubelet gives up after two minutes
_ARCH = "ARCH"  # begins a key; no namespace of Kubernetes has capitals
_KEY_CHARACTERS = 100  # leaves room for what jobs are called before and after it


class Wish:
    """What a container asked for."""

    __slots__ = ("keep", "key", "namespace", "place", "policy", "restore", "tcp", "tries", "volumes", "wait_s")

    def __init__(
        self,
        key: str,
        restore: str,
        policy: str = "fresh",
        tries: int = 1,
        namespace: str = "",
        keep: str = "always",
        wait_s: float | None = None,
        tcp: str = "",
        volumes: str = "",
        place: str = "",
    ) -> None:
        self.key = key
        self.restore = restore  # latest, no, the ID of a checkpoint, another key of its namespace, or a path (placed)
        self.policy = policy  # fresh: start anew when it cannot be restored; fail
        self.tries = tries
        self.keep = keep  # always, or until-success
        self.tcp = tcp  # close or keep: what becomes of open connections; "": as the machine says
        self.volumes = volumes  # yes or no: whether they are saved; "": as the machine says
        self.wait_s = wait_s  # None: as the machine says
        self.place = place  # where ARCH kept its checkpoint, which is its first generation if it has none here
        self.namespace = namespace  # in a cluster: what no key, and nothing that it begins with, leads out of

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Wish:
        """What `facts` were of."""
        return cls(**{"restore": "latest", **facts})

    @property
    def is_until_success(self) -> bool:
        return self.keep == "until-success"

    def with_key(self, key: str) -> Wish:
        return Wish(**{name: getattr(self, name) for name in self.__slots__} | {"key": key})

    def facts(self) -> dict[str, str | int]:
        """As a mark has it."""
        facts: dict[str, str | int] = {name: getattr(self, name) for name in ("key", "restore", "policy", "tries")}
        facts |= {} if self.keep == "always" else {"keep": self.keep}
        return facts | {name: value for name in ("volumes", "namespace") if (value := getattr(self, name))}

    def key_of(self, name: str) -> str:
        """The key that a workload of its namespace has by that name."""
        return _joined([self.namespace, name] if self.namespace else [name])


def wish_of(spec: Mapping[str, object], owner: Owner | None = None, bundle: str = "") -> Wish | None:
    """None when the container did not opt in; Validation when it asks for what cannot be."""
    env = _object(spec.get("process")).get("env")
    entries = env if isinstance(env, list) else ()
    environment = dict(entry.split("=", 1) for entry in entries if isinstance(entry, str) and "=" in entry)
    notes = notes_of(spec)

    def asked(note: str, *names: str) -> str:
        """An annotation of ours, else the first of these in the environment or among the annotations."""
        note_value = notes.get(f"kedge.dev/{note}")
        return note_value or next((value for name in names if (value := environment.get(name) or notes.get(name))), "")

    restore = asked("restore", "KEDGE_RESTORE", "RESTORE_FROM", "kybernate.io/restore-from")
    wanted_text = asked("checkpoint", "KEDGE_CHECKPOINT")
    is_of_arch = not wanted_text and environment.get("ARCH_ENABLE", "").strip().lower() in _YES
    if not is_of_arch and wanted_text.strip().lower() not in _YES and restore in ("", "no"):
        return None
    if notes.get(_TYPE) == "sandbox":
        return None
    _refuse_strays(notes)
    policy, _, count = (asked("policy", "KEDGE_POLICY") or "fresh").partition(":")
    if policy not in ("fresh", "fail", "retry") or count not in ("", *"123456789"):
        raise _invalid(f"unknown policy: {policy}:{count}", hint="use fresh, fail or retry:N, N from 1 to 9")
    keep = _choice("keep", asked("keep", "KEDGE_KEEP"), ("always", "until-success"))
    given = asked("key", "KEDGE_WORKLOAD")
    names = _names_in_arch(bundle) if is_of_arch and not notes.get(POD[0]) else []
    return Wish(
        key=_joined([_ARCH, *names]) if names and not given else key_of(notes, given, owner),
        restore=restore if restore[:1] == "/" else _name("restore", restore or "latest"),
        policy="fail" if policy == "fail" else "fresh",
        tries=int(count or 3) if policy == "retry" else 1,
        namespace=notes.get(POD[0], ""),
        keep=keep or ("until-success" if is_of_arch else "always"),
        wait_s=_wait_s(asked("wait", "KEDGE_WAIT")),
        tcp=_choice("tcp", asked("tcp", "KEDGE_TCP"), ("close", "keep")),
        volumes=_choice("volumes", asked("volumes", "KEDGE_VOLUMES"), ("yes", "no")),
        place="/".join((_home_in_arch(environment), *names)) if names else "",
    )


def _names_in_arch(bundle: str) -> list[str]:
    """The namespace and the ID of a container, which ARCH too took from where engines put bundles."""
    names = bundle.strip("/").split("/")[-2:]
    return names if bundle[:1] == "/" and len(names) == 2 else []


def _home_in_arch(environment: Mapping[str, str]) -> str:
    if shared := environment.get("ARCH_SHAREDFS_HOST_PATH"):
        return f"{shared.rstrip('/')}/checkpoint"
    return (environment.get("ARCH_CHECKPOINT_HOST_PATH") or "/var/tmp/arch/checkpoint").rstrip("/")  # nosec B108


def notes_of(spec: Mapping[str, object]) -> dict[str, str]:
    """The annotations of a container. What engines say of its pod is called as containerd calls it, and comes from the
    engine that it is: CRI-O passes on whatever the author of a pod has written, also in the name of containerd."""
    notes = {str(name): str(value) for name, value in _object(spec.get("annotations")).items()}
    if notes.get(_MANAGER) != "cri-o":
        return notes
    if any(name.startswith("io.kubernetes.cri.") for name in notes):  # of one of the two, somebody lies
        return {name: value for name, value in notes.items() if name not in (*POD, SANDBOX, UID)}
    return notes | {theirs: notes[name] for name, theirs in _OF_CRIO.items() if name in notes}


def _refuse_strays(notes: Mapping[str, str]) -> None:
    """Without its namespace, a container of a pod could name the key of any other."""
    is_of_pod = notes.get(_MANAGER) != "libpod" and any(name.startswith("io.kubernetes.") for name in notes)
    if is_of_pod and not notes.get(POD[0]):
        raise _invalid(
            "a container of Kubernetes asks for checkpoints, and its engine does not tell its namespace",
            hint="use containerd or CRI-O, which do",
        )


def _choice(name: str, text: str, choices: tuple[str, ...]) -> str:
    """One of these, or nothing."""
    if text and text not in choices:
        raise _invalid(f"unknown {name}: {text}", hint=f"use {' or '.join(choices)}")
    return text


def _wait_s(text: str) -> float | None:
    if not text:
        return None
    if not text.isdecimal() or len(text) > 9 or int(text) > _MOST_WAIT_S:
        raise _invalid(f"invalid wait: {text}", hint=f"use whole seconds, up to {_MOST_WAIT_S}")
    return float(text)


def key_of(notes: Mapping[str, str], given: str = "", owner: Owner | None = None) -> str:
    """The workload, never the container, whose ID changes. In a cluster, no key leads out of its namespace."""
    space, pod, name = (notes.get(annotation, "") for annotation in POD)
    if space and given:
        return _joined([space, given])
    if space and pod and name:
        return _joined([space, pod if owner is None else owner(notes), name], unescaped=":")
    if not given:
        raise _invalid("a container asks for checkpoints and names no workload", hint="set KEDGE_WORKLOAD")
    return _joined([given])


def has_made_up_name(pod: str) -> bool:
    """Whether a controller may have given it: such names end in five characters of those that Kubernetes draws from."""
    return pod[-6:-5] == "-" and _DRAWN.issuperset(pod[-5:])


def pod_of(spec: Mapping[str, object]) -> dict[str, str] | None:
    """{namespace, name, container} of a container of a pod, for lists; None of any other."""
    notes = notes_of(spec)
    names = [notes.get(name, "") for name in POD]
    return dict(zip(("namespace", "name", "container"), names, strict=True)) if all(names) else None


def _object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _joined(parts: list[str], unescaped: str = "") -> str:
    """One name of several, whatever is in them: nobody can write one that looks like that of others."""
    escaped = (
        "".join(char if char in _PLAIN or char in unescaped else f"+{ord(char):02x}" for char in part) for part in parts
    )
    key = "+".join(escaped)
    if len(key) > _KEY_CHARACTERS:
        from hashlib import sha256

        key = f"{key[: _KEY_CHARACTERS - 20]}-{sha256(key.encode()).hexdigest()[:16]}"
    return _name("key", key)


def _name(what: str, text: str) -> str:
    """A name like those of jobs; most are so plain that nothing needs to be imported to know it."""
    if len(text) <= 64 and text[:1] in _LETTERS and _PLAIN.issuperset(text.replace("+", "").replace(":", "")):
        return text
    from kedge.model import parse_name

    return parse_name(what, text)


def _invalid(message: str, *, hint: str) -> Validation:
    from kedge.errors import Validation

    return Validation(message, hint=hint)
