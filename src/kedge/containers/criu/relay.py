"""The seam in a dump: stands between a runtime and CRIU, and asks Kedge before the paused processes go on or die.

    runc ⇄ relay ⇄ criu swrk          relay ⇄ Kedge, by a socket

When the images are written and everything is still paused, network lock included, CRIU reports "post-dump" and waits
for an answer. The relay passes that on to Kedge, which takes the files of the same moment and, if the processes are
to die, commits the checkpoint. Only when it says yes does CRIU end them. If it says no, or is gone, CRIU lets them run
on. So whoever is killed, and whenever, there is a running container or a whole checkpoint.

A dump that Kedge gives up earlier must be undone by CRIU itself: killed, it would leave its code in the processes.
So it is told that it may write no more, which it takes for a full disk.

Runtimes are told to leave what they dump running, and it is the relay that asks CRIU to end it: should a runtime call
another CRIU, past the relay, nothing ends before it is saved.

Started as `python -IS relay.py CRIU FOLDER TIMEOUT_S end|leave swrk FD` by the `criu` that a runtime finds first on its
PATH: nothing but the standard library can be imported here, and little of it, because every dump waits for this to
start (`socket` and `subprocess` take more time than all the rest). Requests other than a dump go straight to CRIU.
Where there is no runtime, CRIU starts it as its action script: `relay.py --ask FOLDER`.
"""

from __future__ import annotations

import _socket as socket
import array
import os
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MESSAGE_BYTES = 1 << 20
DUMP = 1
NOTIFY = 6
DUMPED = b"dumped"
GO_ON = b"yes"
GIVE_UP = b"give up"
_REFUSED = bytes([1 << 3, NOTIFY, 3 << 3, 0])  # criu_req {type: NOTIFY, notify_success: false}
_OWN_DESCRIPTORS = 500  # ours are moved above this: the numbers below are the runtime's, which CRIU asks us for


def main(real: str, seam: str, timeout_s: int, ending: str, arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] != "swrk":
        os.execv(real, [real, *arguments])  # nosec B606
    runtime = socket.socket(fileno=int(arguments[1]))
    if number_field(runtime.recv(MESSAGE_BYTES, socket.MSG_PEEK), 1) != DUMP:
        os.set_inheritable(runtime.fileno(), True)
        return end(os.posix_spawn(real, [real, *arguments], os.environ, setpgroup=0))
    kedge = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    at(seam, kedge.connect)
    return relay(real, runtime, kedge, timeout_s, ends=ending == "end")


def ask(seam: str) -> int:
    """An action script's exit status: 0 if Kedge says yes."""
    kedge = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        at(seam, kedge.connect)
    except OSError:
        return 1
    return 0 if may_go_on(kedge) else 1


def at(folder: str, bind_or_connect: Callable[[str], None]) -> None:
    """The socket in that folder, by a short name: that of a socket must be, and that of a folder need not."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        bind_or_connect(f"/proc/self/fd/{fd}/seam")
    finally:
        os.close(fd)


def relay(real: str, runtime: socket.socket, kedge: socket.socket, timeout_s: int, *, ends: bool) -> int:
    """Pass messages both ways until CRIU ends."""
    import fcntl

    moved = [
        socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, _OWN_DESCRIPTORS))
        for end in (runtime, kedge)
    ]
    runtime.close()
    kedge.close()
    runtime, kedge = moved
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    far = socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, _OWN_DESCRIPTORS))
    near = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD, _OWN_DESCRIPTORS)  # CRIU inherits it, and no other of ours
    ours.close()
    theirs.close()
    lend_directories(runtime)
    request = with_our_options(runtime.recv(MESSAGE_BYTES), timeout_s, ends=ends)
    # Python ignores SIGXFSZ, and so must CRIU, whom it would end when it may write no more: it inherits that
    criu = os.posix_spawn(real, [real, "swrk", str(near)], os.environ, setpgroup=0)
    ended = os.pidfd_open(criu)
    os.close(near)
    far.send(request)
    is_decided = False
    while message := next_message(far, None if is_decided else kedge, criu, ended):
        if is_post_dump(message[0]):
            is_decided = True
            if not may_go_on(kedge):
                far.send(_REFUSED)
                continue
        if not passed_on(message, runtime, far):
            break
    far.close()  # with a question still open, CRIU gives up
    code = end(criu)
    runtime.close()
    return code


def passed_on(message: tuple[bytes, list[int]], runtime: socket.socket, criu: socket.socket) -> bool:
    """What CRIU says, and the runtime's answer if that was a question; whether there is more to come. A runtime that is
    gone answers nothing."""
    try:
        send(runtime, *message)
        return number_field(message[0], 1) == NOTIFY and forward(runtime, criu) is not None
    except OSError:
        return False


def end(criu: int) -> int:
    """Wait for CRIU; its exit status. Killed, it leaves its children, which have the locks of the attempt and never
    end. All are in its process group, which nobody else can have as long as it is not waited for."""
    how = os.waitid(os.P_PID, criu, os.WEXITED | os.WNOWAIT)
    if how is not None and how.si_code != os.CLD_EXITED:
        os.killpg(criu, 9)
    return os.waitstatus_to_exitcode(os.waitpid(criu, 0)[1])


def next_message(
    criu: socket.socket, kedge: socket.socket | None, pid: int, ended: int
) -> tuple[bytes, list[int]] | None:
    """What CRIU says next; None when it has ended: killed, it may leave children that have its socket too. When Kedge,
    if it has still a say, gives up meanwhile or is gone, CRIU writes no more."""
    import select

    while criu not in (ready := select.select([criu, ended, *(() if kedge is None else (kedge,))], [], [])[0]):
        if ended in ready:
            said_before = select.select([criu], [], [], 0)[0]
            return forward(criu, None) if said_before else None
        import resource

        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
        kedge = None
    return forward(criu, None)


def lend_directories(runtime: socket.socket) -> None:
    """CRIU opens the image directory as a descriptor of its client, which is us now: have it under that number."""
    peer = runtime.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid = int.from_bytes(peer[:4], sys.byteorder)
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        try:
            if 2 < int(name) < _OWN_DESCRIPTORS and stat.S_ISDIR(os.stat(path).st_mode):
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                if fd != int(name):
                    os.dup2(fd, int(name), inheritable=False)
                    os.close(fd)
        except FileNotFoundError:  # closed meanwhile
            continue


def may_go_on(kedge: socket.socket) -> bool:
    """Ask Kedge. No answer is no: then the processes run on."""
    try:
        kedge.send(DUMPED)
        return kedge.recv(16) == GO_ON
    except OSError:
        return False


def forward(source: socket.socket, target: socket.socket | None) -> tuple[bytes, list[int]] | None:
    """The next message and the descriptors with it, sent to `target` if there is one; None at the end."""
    message, control, _, _ = source.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(64))
    descriptors = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if not message:
        return None
    if target is not None:
        send(target, message, list(descriptors))
    return message, list(descriptors)


def send(target: socket.socket, message: bytes, descriptors: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    target.sendmsg([message], rights)
    for fd in descriptors:
        os.close(fd)


def with_our_options(request: bytes, timeout_s: int, *, ends: bool) -> bytes:
    """The request, in which CRIU gives up pausing after that long, asks at the seam (crun would not have it ask), and
    ends what it dumped, if that is wanted. The last of two values counts:

    criu_req {type, opts {…, timeout: timeout_s, notify_scripts: true, leave_running: false}}
    """
    if not 0 < timeout_s < 128 or request[2:3] != b"\x12":
        raise ValueError("the runtime asks for a dump in a way that is not known here")  # and it runs on
    size = shift = 0
    position = 3
    while True:
        byte = request[position]
        size |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            break
    ours = bytes([0xE8, 0x02, timeout_s, 0x60, 1, *((0x18, 0) if ends else ())])
    options = request[position : position + size] + ours
    length = bytes([len(options) & 0x7F | 0x80, len(options) >> 7 & 0x7F | 0x80, len(options) >> 14])
    return request[:3] + length + options + request[position + size :]


def is_post_dump(message: bytes) -> bool:
    """criu_resp {type: NOTIFY, notify: {script: "post-dump"}}."""
    return number_field(message, 1) == NOTIFY and b"\x0a\x09post-dump" in message


def number_field(message: bytes, wanted: int) -> int | None:
    """A small number field at the beginning of a protobuf message."""
    return message[1] if len(message) > 1 and message[0] == wanted << 3 else None


if __name__ == "__main__":
    if sys.argv[1] == "--ask":
        sys.exit(ask(sys.argv[2]))
    os._exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:]))
