"""The command line of runc, read by its own tables of flags (1.1 to 1.4), without losing a word of it.

A runtime wrapper sits in front of every call that an engine makes, so this file is imported on a hot path: it needs
nothing but the interpreter, not even `dataclasses`, which would cost more than the rest of the start.

    call = parse(sys.argv[1:])
    if call.problem is None and call.command == "create":
        argv = call.to_restore(image_path, work_path)

What runc itself would refuse, or a flag that is not in the tables, is `problem`: such a call is passed on as it came.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A flag is `name`, or `name/alias`; one that takes a value ends with a colon. --help is everywhere.
GLOBAL_FLAGS = "debug log: log-format: root: criu: systemd-cgroup rootless: version/v"

_IMAGES = "image-path: work-path: tcp-established ext-unix-sk shell-job file-locks manage-cgroups-mode: empty-ns: "
_START = "bundle/b: console-socket: pidfd-socket: pid-file: no-pivot no-new-keyring preserve-fds: "

COMMAND_FLAGS = {
    "checkpoint": _IMAGES + "parent-path: leave-running tcp-skip-in-flight link-remap lazy-pages status-fd: "
    "page-server: pre-dump auto-dedup",
    "create": _START,
    "delete": "force/f",
    "events": "interval: stats",
    "exec": "console-socket: pidfd-socket: cwd: env/e: tty/t user/u: additional-gids/g: process/p: detach/d pid-file: "
    "process-label: apparmor: no-new-privs cap/c: preserve-fds: cgroup: ignore-paused",
    "features": "",
    "help": "",
    "init": "",
    "kill": "all/a",
    "list": "format/f: quiet/q",
    "pause": "",
    "ps": "format/f:",
    "restore": _IMAGES + "console-socket: bundle/b: detach/d pid-file: no-subreaper no-pivot auto-dedup lazy-pages "
    "lsm-profile: lsm-mount-context:",
    "resume": "",
    "run": _START + "detach/d keep no-subreaper",
    "spec": "bundle/b: rootless",
    "start": "",
    "state": "",
    "update": "resources/r: blkio-weight: cpu-period: cpu-quota: cpu-burst: cpu-share: cpu-rt-period: cpu-rt-runtime: "
    "cpuset-cpus: cpuset-mems: kernel-memory: kernel-memory-tcp: memory: cpu-idle: memory-reservation: memory-swap: "
    "pids-limit: l3-cache-schema: mem-bw-schema:",
}  # fmt: skip

_WITHOUT_ID = frozenset(("features", "help", "init", "list", "spec"))
_WORDS_FOLLOW = frozenset(("exec", "ps"))  # from the container ID on, everything belongs to another program
_TRUE = frozenset(("1", "t", "T", "true", "TRUE", "True"))
_FALSE = frozenset(("0", "f", "F", "false", "FALSE", "False"))

_LOG = frozenset(("log", "log-format"))

# Flags of create and run that restore knows under the same name. The others are not for a process that already was.
_CARRIED_OVER = frozenset(("bundle", "pid-file", "console-socket", "no-pivot", "detach", "no-subreaper"))


class Flag:
    """One flag as given: its long name, and its text or, for a switch, True or False."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: str | bool) -> None:
        self.name = name
        self.value = value

    def words(self) -> list[str]:
        """The flag for a command line. A value stays behind its name even when it begins with a dash."""
        if self.value is True:
            return [f"--{self.name}"]
        return [f"--{self.name}={'false' if self.value is False else self.value}"]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Flag) and (self.name, self.value) == (other.name, other.value)

    def __repr__(self) -> str:
        return f"Flag({self.name!r}, {self.value!r})"


class Call:
    """One call of runc. `argv` is what came, without the program; the rest is what it means."""

    __slots__ = ("arguments", "argv", "command", "flags", "options", "problem")

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = tuple(argv)
        self.options: tuple[Flag, ...] = ()  # before the command
        self.command = ""
        self.flags: tuple[Flag, ...] = ()  # of the command
        self.arguments: tuple[str, ...] = ()
        self.problem: str | None = None  # why this call is none that we understand

    @property
    def container_id(self) -> str:
        """ "" when the command has none, or none was given."""
        return "" if self.command in _WITHOUT_ID or not self.arguments else self.arguments[0]

    @property
    def rest(self) -> tuple[str, ...]:
        """What follows the container ID: the signal of kill, the program of exec."""
        return self.arguments[1:]

    def get(self, name: str) -> str:
        """The text of a flag of the command or, if it has none of that name, before it; "" if not given. Last wins."""
        for flag in (*reversed(self.flags), *reversed(self.options)):
            if flag.name == name and isinstance(flag.value, str):
                return flag.value
        return ""

    def is_set(self, name: str) -> bool:
        """Whether a switch is on."""
        for flag in (*reversed(self.flags), *reversed(self.options)):
            if flag.name == name:
                return flag.value is not False
        return False

    def other(self, command: str, *words: str) -> list[str]:
        """A call of another command for the same container, with the same options before it but the engine's log.

        What it says is for us: an engine takes the last error in that file for the reason of whatever fails later.
        """
        return [*self._words_but_log(), command, *words, *self._last()]

    def _words_but_log(self) -> list[str]:
        return [word for flag in self.options if flag.name not in _LOG for word in flag.words()]

    def _last(self) -> list[str]:
        return ["--", self.container_id] if self.container_id.startswith("-") else [self.container_id]

    def to_restore(self, image_path: str, work_path: str, more: Iterable[str] = ()) -> list[str]:
        """What to call instead of this create (or run), so that the container is restored from its images.

        A create answers when the container exists and leaves it to itself, so restore gets --detach, and
        --no-subreaper because the caller is there to see to its children. The engine's log is left out, as in `other`.
        """
        carried = [flag for flag in self.flags if flag.name in _CARRIED_OVER]
        if self.command == "create":
            carried = [*carried, Flag("detach", True), Flag("no-subreaper", True)]
        words = [word for flag in carried for word in flag.words()]
        paths = (f"--image-path={image_path}", f"--work-path={work_path}")
        return [*self._words_but_log(), "restore", *words, *paths, *more, *self._last()]

    def __repr__(self) -> str:
        return f"Call({list(self.argv)!r})"


class _NotOurs(Exception):
    pass


def parse(argv: Sequence[str]) -> Call:
    """What a call of runc means. Never raises."""
    call = Call(argv)
    try:
        options, rest = _scan(call.argv, _known(GLOBAL_FLAGS))
        call.options = tuple(options)
        if not rest:
            raise _NotOurs("no command")
        if rest[0] not in COMMAND_FLAGS:
            raise _NotOurs(f"no command that is known: {rest[0]}")
        call.command = rest[0]
        known = _known(COMMAND_FLAGS[rest[0]])
        words = rest[1:] if rest[0] in _WORDS_FOLLOW else _flags_first(rest[1:], known)
        flags, arguments = _scan(words, known)
        call.flags, call.arguments = tuple(flags), tuple(arguments)
        if call.is_set("help") or call.is_set("version"):
            raise _NotOurs("a question about runc itself")
    except _NotOurs as reason:
        call.problem = str(reason)
    return call


def _known(table: str) -> dict[str, tuple[str, bool]]:
    """Every spelling of the flags of a table: (long name, whether a value follows)."""
    spellings = {"help": ("help", False), "h": ("help", False)}
    for word in table.split():
        names = word.removesuffix(":").split("/")
        for name in names:
            spellings[name] = (names[0], word.endswith(":"))
    return spellings


def _scan(words: Sequence[str], known: dict[str, tuple[str, bool]]) -> tuple[list[Flag], Sequence[str]]:
    """Flags up to the first word that is none, as Go's flag package reads them; and what follows."""
    flags: list[Flag] = []
    spelled: dict[str, str] = {}
    position = 0
    while position < len(words):
        word = words[position]
        if word == "--":
            return flags, words[position + 1 :]
        if len(word) < 2 or word[0] != "-":
            break
        position += 1
        spelling, equals, text = word.removeprefix("-").removeprefix("-").partition("=")
        if spelling not in known:
            raise _NotOurs(f"no flag that is known: {word}")
        name, takes_value = known[spelling]
        if spelled.setdefault(name, spelling) != spelling:
            raise _NotOurs(f"two forms of one flag: {word}")
        if not takes_value:
            if equals and text not in _TRUE and text not in _FALSE:
                raise _NotOurs(f"neither true nor false: {word}")
            flags.append(Flag(name, not equals or text in _TRUE))
            continue
        if not equals:
            if position == len(words):
                raise _NotOurs(f"no value for {word}")
            text = words[position]
            position += 1
        flags.append(Flag(name, text))
    return flags, words[position:]


def _flags_first(words: Sequence[str], known: dict[str, tuple[str, bool]]) -> list[str]:
    """The words in the order in which runc looks at them: flags behind the container ID count too.

    This follows runc to the letter: the word behind a flag without "=" stays behind it, also behind a switch.
    """
    first: list[str] = []
    then: list[str] = []
    may_be_value = False
    for position, word in enumerate(words):
        is_flag = word[:1] == "-" and word.lstrip("-").partition("=")[0] in known
        if may_be_value and not is_flag:
            may_be_value = False
            first.append(word)
        elif word == "--":
            return [*first, "--", *then, *words[position + 1 :]]
        elif is_flag:
            first.append(word)
            may_be_value = "=" not in word
        else:
            then.append(word)
    return first + then
