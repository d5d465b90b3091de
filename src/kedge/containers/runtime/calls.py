"""`kedge-runc` for the containers that opted in: what it does instead of runc, or besides it.

    create       claims its workload; brings the newest good generation back, paused; else the real create
    start        lets it go on, if it was brought back; else the real start
    kill TERM    freezes it into the store, which ends it; if that fails, the signal
    checkpoint   freezes it into the store, and gives the caller the images it asked for
    state, resume, pause, kill, delete   of one that was frozen and has ended: answered, because runc forgot it
    delete       the real one; a container that died right after it was brought back marks its generation as bad, and
                 one that ended well takes its generations with it, if it asked for that

A mark per container remembers what it is (`marks`); its generations are in the store and outlive it. Nothing is
printed to stdout but what runc would print. Errors go to runc's log and to stderr, in words.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from . import arguments, marks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kedge.containers.guard import Guard

    from .opt_in import Wish

ORPHAN_S = 10.0  # what a killed call of ours had started is waited for so long
CRASH_S = 10.0  # one that ends this soon after it was brought back, by itself, is not brought back from there again
_TERM = ("", "15", "TERM", "SIGTERM")


def main(argv: list[str]) -> int:
    real, *words = argv
    call = arguments.parse(words)
    action = _ACTIONS.get(call.command)
    if call.problem is not None or action is None or "/" in call.container_id or call.container_id in ("", ".", ".."):
        return pass_on(real, words)
    from kedge.errors import CheckpointError

    runtime = Runtime(real, call)
    try:
        status = action(runtime)
    except CheckpointError as error:
        runtime.log(f"kedge: {error}")
        return 1
    except Exception as error:  # noqa: BLE001 - a fault of ours must not keep a container from being stopped or removed
        runtime.log(f"kedge: {type(error).__name__}: {error}")
        status = 1 if call.command in ("create", "run", "checkpoint") else None
    return pass_on(real, words) if status is None else status


def pass_on(real: str, words: list[str]) -> NoReturn:
    os.execv(real, [real, *words])  # nosec B606


class Runtime:
    """One call. A method answers its exit status, or None: then the real runc does it."""

    def __init__(self, real: str, call: arguments.Call) -> None:
        self.real = real
        self.call = call
        self.id = call.container_id
        self.root = call.get("root") or "/run/runc"
        self.mark = marks.mark_of(self.root, self.id)
        self.manager: Any = None  # of an open store, where one call follows another
        self.guard: Guard | None = None  # of a container that was brought back and that nobody knows of yet

    # The commands

    def create(self) -> int | None:
        from kedge.containers.engine import runc
        from kedge.containers.engine.owners import owner_of_container

        from .opt_in import wish_of

        bundle = Path(self.call.get("bundle") or ".").absolute()
        spec = runc.read_spec(bundle)
        wish = wish_of(spec, owner_of_container)
        if wish is None:
            return None
        with ExitStack() as stack:
            lock = self._alone(stack)
            status = self._create(wish, bundle, spec)
            if status is None and lock is not None:
                os.set_inheritable(os.dup(lock), True)  # the real runc holds it until it has made the container
            return status

    def _alone(self, stack: ExitStack) -> int | None:
        """One create of an ID at a time: a second one would exchange the files of what the first has brought back."""
        from kedge.containers.attempts import only_one
        from kedge.errors import StorageError

        with suppress(StorageError):  # no room for it: then nothing can be brought back either
            return stack.enter_context(only_one("create", self.root, self.id, wait_s=ORPHAN_S))
        return None

    def _create(self, wish: Wish, bundle: Path, spec: dict[str, Any]) -> int | None:
        if os.path.lexists(f"{self.root}/{self.id}") and self._status():
            return None  # taken: runc refuses it, and whose it is must not suffer
        environment = {name: value for name in marks.PLACES if (value := os.environ.get(name))}
        with self._store() as manager:
            claim = self._claim(manager, wish)
            facts = {"wish": wish.facts(), "claim": asdict(claim), "bundle": str(bundle), "environment": environment}
            self._remember(**facts, restored=None)  # should we be killed, `delete` knows that it was ours
            try:
                restored = self._bring_back(manager, wish, claim, bundle, spec) if wish.restore != "no" else None
            except BaseException:
                manager.break_lease(claim)
                self.mark.unlink(missing_ok=True)
                raise
        if restored is None:
            return None
        self._remember(**facts, restored=restored)
        if self.guard is not None:
            self.guard.keep()
        return 0

    def run(self) -> int | None:
        """Create and start at once, for people. In the foreground, where runc stays, nothing is brought back."""
        if not self.call.is_set("detach"):
            return None
        status = self.create()
        if status == 0:
            return self.start()
        if status is None and _is_forgotten_after_success(self._recall()):
            status = subprocess.run([self.real, *self.call.argv], check=False).returncode
            if status == 0:
                self._watch()
        return status

    def start(self) -> int | None:
        marked = self._recall()
        is_restored = bool(marked.get("restored")) and not marked.get("started")
        if not is_restored and not _is_forgotten_after_success(marked):
            return None
        if _is_forgotten_after_success(marked):
            self._watch()
        done = self._runc(*(self.call.other("resume") if is_restored else self.call.argv))
        if done.returncode == 0:
            self._remember(**{**marked, "started": time.time()})
        else:
            self.log(done.stderr.strip())
        return done.returncode

    def _watch(self) -> None:
        from kedge.containers.engine import runc

        from . import exits

        exits.watch(str(self.mark), runc.look_up(self.id, engine_of(self.root), self.root, self.real).pid)

    def kill(self) -> int | None:
        marked = self._recall()
        if self._has_ended(marked):
            return 0
        signal = self.call.rest[0] if self.call.rest else ""
        if signal.upper() not in _TERM or self.call.is_set("all") or not self._is_running():
            self._remember(**{**marked, "killed": True})
            return None
        if reason := self.keep(float(os.environ.get("KEDGE_DEADLINE_S") or 8)):
            self.log(f"kedge: not frozen, the signal is passed on: {reason}", level="warning")
            self._remember(**{**self._recall(), "killed": True})
            return None
        return 0

    def keep(self, deadline_s: float) -> str:
        """Freeze it into the store, which ends it: why that could not be, "" if it could."""
        from kedge.errors import CheckpointError

        marked = self._recall()
        if self._has_ended(marked):
            return ""
        try:
            self._freeze(marked, leave_running=False, deadline_s=deadline_s)
        except CheckpointError as error:
            return str(error)
        return ""

    def signal(self) -> subprocess.CompletedProcess[str]:
        """It was asked to stop, and must: the real runc's kill."""
        self._remember(**{**self._recall(), "killed": True})
        return self._runc(*self.call.argv)

    def checkpoint(self) -> int | None:
        if self.call.is_set("pre-dump") or self.call.is_set("lazy-pages"):
            return None
        marked = self._recall()
        leave_running = self.call.is_set("leave-running")
        self._freeze(marked, leave_running=leave_running, image_path=self.call.get("image-path") or "checkpoint")
        return 0

    def state(self) -> int | None:
        marked = self._recall()
        if not self._has_ended(marked):
            return None
        bundle = str(marked.get("bundle", ""))
        answer = {"ociVersion": "1.0.2-dev", "id": self.id, "pid": 0, "status": "stopped", "bundle": bundle,
                  "rootfs": os.path.join(bundle, "rootfs"), "created": "", "owner": ""}  # fmt: skip
        sys.stdout.write(json.dumps(answer, indent=2) + "\n")
        return 0

    def resume(self) -> int | None:
        return 0 if self._has_ended(self._recall()) else None

    def pause(self) -> int | None:
        return 0 if self._has_ended(self._recall()) else None

    def delete(self) -> int | None:
        from kedge.containers.criu.command import urgent

        with urgent():  # see _remove
            self._wait_for_orphans()
            return self._remove() if self._has_lost_its_shim() else self._delete()

    def _wait_for_orphans(self) -> None:
        """What a killed call had started: a restore whose processes are killed half-way hangs."""
        from kedge.containers.attempts import only_one
        from kedge.errors import Conflict

        with suppress(Conflict), only_one(self.root, self.id, wait_s=ORPHAN_S):
            pass

    def _delete(self) -> int:
        marked = self._recall()
        if self._has_ended(marked) or not self._status():  # or somebody was killed before it could forget it
            self._runc(*self.call.other("delete", "--force"))
            self._forget(marked)
            return 0
        if not marked.get("killed") and not self._is_running() and not self._end_after_success(marked):
            self._blame_generation(marked)
        done = self._runc(*self.call.argv)
        if done.returncode == 0:
            self._forget(marked)
        sys.stderr.write(done.stderr)
        return done.returncode

    def _has_lost_its_shim(self) -> bool:
        """containerd forces a removal only then."""
        return self.call.is_set("force") and engine_of(self.root) != "runc"

    def _remove(self) -> int:
        """What a dead shim left. containerd gives that five seconds, mounts and bundle included, which it leaves lying
        about else: what can wait is done by a process of its own, and if that fails, by who comes next. It is not known
        what the container died of."""
        marked = self._recall()
        done = self._runc(*self.call.argv)
        sys.stderr.write(done.stderr)
        if done.returncode == 0 and os.fork() == 0:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(null, stream)
            try:
                self._end_after_success(marked)
                self._forget(marked)
            finally:
                os._exit(0)
        return done.returncode

    def _end_after_success(self, marked: dict[str, Any]) -> bool:
        """End its history, if it asked for that and ended by itself with status 0; answers whether it did."""
        from kedge.containers import snapshot

        from . import exits

        if not _is_forgotten_after_success(marked) or exits.status_of(str(self.mark)) != 0:
            return False
        with self._store() as manager:
            for one in snapshot.generations(manager, "container", marked["wish"]["key"]):
                if not one.is_pinned:
                    manager.delete(one.job, one.id)
        return True

    def _blame_generation(self, marked: dict[str, Any]) -> None:
        """If it died right after it was brought back, that speaks against its generation."""
        if marked.get("restored") and time.time() - float(marked.get("started") or time.time()) < CRASH_S:
            with self._store() as manager:
                if manager.exists(marked["restored"]):
                    manager.tag(marked["restored"], crashed="after-restore")

    def _forget(self, marked: dict[str, Any]) -> None:
        from kedge.containers.attempts import put_right

        from . import exits

        self._give_back(marked)
        put_right()  # what a killed call left
        exits.forget(str(self.mark))
        self.mark.unlink(missing_ok=True)

    # Bringing back

    def _claim(self, manager: Any, wish: Any) -> Any:
        """Claim the workload, whose key may become one that is this container's alone; Conflict if it sleeps."""
        from kedge.containers import hibernation

        from . import claims

        is_only = wish.policy == "fail"
        claim = claims.take(manager, wish.key, self.root, self.id, only_first=is_only, wait_s=claims.LEAVING_S)
        if (key := claims.key_of(claim)) != wish.key:
            self.log(f"kedge: {wish.key} is alive elsewhere: this one is {key}", level="warning")
            wish.key = key
        try:
            hibernation.refuse_asleep(manager, key)
        except BaseException:
            manager.break_lease(claim)
            raise
        return claim

    def _bring_back(self, manager: Any, wish: Any, claim: Any, bundle: Path, spec: dict[str, Any]) -> str | None:
        """The generation that the container goes on from; None when it is to start anew."""
        from kedge.containers import snapshot
        from kedge.errors import CheckpointError, Corrupted, StorageError

        if wish.restore == "latest" or wish.restore[:1] == "/":
            if wish.restore != "latest":
                self._bring_in(manager, wish, claim, spec)
            kept = snapshot.generations(manager, "container", wish.key)
            candidates = [one for one in reversed(kept) if one.status != "corrupted" and "crashed" not in one.tags]
        else:
            candidates = [snapshot.find_for(manager, wish)]
        for number, checkpoint in enumerate(candidates):
            for attempt_number in range(wish.tries):
                try:
                    self._restore(manager, checkpoint.id, bundle, spec)
                except CheckpointError as error:
                    if self.guard is not None:
                        self.guard.drop()
                        self.guard = None
                    self._runc(*self.call.other("delete", "--force"))
                    self.log(f"kedge: {checkpoint.id} could not be restored: {error}", level="warning")
                    is_damaged = isinstance(error, Corrupted) and manager.condemn(checkpoint.id).status == "corrupted"
                    is_last = attempt_number == wish.tries - 1
                    if is_last and isinstance(error, StorageError):
                        raise  # nothing speaks against the generation: an older one, or none, would undo its work
                    if is_last and wish.policy == "fail" and number == len(candidates) - 1:
                        raise
                    if is_damaged:
                        break  # it stays so
                else:
                    return str(checkpoint.id)
        return None

    def _bring_in(self, manager: Any, wish: Any, claim: Any, spec: dict[str, Any]) -> None:
        """What lies at the path that it named becomes a generation, once; it may be gone when it is one already."""
        from kedge.containers import snapshot
        from kedge.errors import NotFound

        from . import dumps as placed

        try:
            placed.bring_in(manager, wish.restore, key=wish.key, namespace=wish.namespace, spec=spec, lease=claim)
        except NotFound as error:
            if not snapshot.generations(manager, "container", wish.key):
                raise
            self.log(f"kedge: what is kept already is used: {error}", level="warning")

    def _restore(self, manager: Any, checkpoint_id: str, bundle: Path, spec: dict[str, Any]) -> None:
        from kedge.containers import network, snapshot
        from kedge.containers.attempts import attempt, only_one
        from kedge.containers.companions import companions_for
        from kedge.containers.restore import files_of, run_restore, unpack_images
        from kedge.containers.rootfs import find_rootfs, seeing

        checkpoint, kept = snapshot.load(manager, checkpoint_id)
        companions = companions_for(spec)
        for companion in companions:
            companion.before_restore(checkpoint.metadata)
        net = network.mode_of(spec)
        network.refuse_mismatch(kept.network, net)
        with ExitStack() as stack:
            lock = stack.enter_context(only_one(self.root, self.id, wait_s=ORPHAN_S))
            work = stack.enter_context(attempt("restore", self.id, lock))
            rootfs = find_rootfs(bundle, str(spec.get("root", {}).get("path", "rootfs")))
            put_in_place = stack.enter_context(files_of(kept, rootfs, work))
            unpack_images(kept, work)
            put_in_place()
            options = [str(one) for one in kept.criu.get("options", ())]
            command = [self.real, *self.call.to_restore(str(work.images), str(work.path), options)]
            run_restore(command, work, net, lambda words, held: self._run_guarded(seeing(rootfs, words), held))
            self._accompany(companions)
            paused = self._runc(*self.call.other("pause"))
            if paused.returncode:
                self.log(f"kedge: it runs before it is started: {paused.stderr.strip()}", level="warning")

    def _run_guarded(self, command: Sequence[str], held: Sequence[int]) -> int:
        from kedge.containers.guard import Guard

        self.guard = Guard(command, [self.real, *self.call.other("delete", "--force")], held)
        return self.guard.wait()

    def _accompany(self, companions: list[Any]) -> None:
        """It runs again: what is not memory of its processes comes back too, or it ends."""
        if not companions:
            return
        from kedge.containers.companions import Phases
        from kedge.containers.engine import runc
        from kedge.containers.pids import pids_below

        pid = runc.look_up(self.id, engine_of(self.root), self.root, self.real).pid
        try:
            for companion in companions:
                companion.after_restore(pids_below(pid), Phases())
        except BaseException:
            self._runc(*self.call.other("delete", "--force"))
            raise

    # Freezing

    def _freeze(
        self, marked: dict[str, Any], *, leave_running: bool, image_path: str = "", deadline_s: float | None = None
    ) -> None:
        from kedge.containers.checkpoint import OPTIONS, freeze_container
        from kedge.containers.companions import companions_for
        from kedge.containers.engine import runc

        from . import claims

        container = runc.look_up(self.id, engine_of(self.root), self.root, self.real)
        options = [one for one in OPTIONS if self.call.is_set(one[2:])]
        with self._store() as manager:
            before, marked = marked, claims.keep(manager, marked, self.root, self.id)
            if marked != before:
                self.log(f"kedge: this is kept as {marked['wish']['key']}", level="info")
            marked.pop("ending", None)  # of a call that was killed
            key = marked["wish"]["key"]
            with nullcontext() if leave_running else claims.leaving(manager, key):
                self._remember(**marked, **({} if leave_running else {"ending": time.time()}))
                try:
                    freeze_container(
                        manager,
                        container,
                        key=key,
                        lease=claims.claim_of(marked),
                        leave_running=leave_running,
                        options=options,
                        deadline_s=deadline_s,
                        companions=companions_for(container.spec),
                        images_for=(lambda work: give_images(work.images, Path(image_path))) if image_path else None,
                    )
                except BaseException:
                    self._remember(**marked)
                    raise
                if not leave_running:
                    claims.give_back(manager, marked)
            if not leave_running:
                marked.pop("claim")  # so that `delete` need not open the store
                self._remember(**marked, ended=time.time())

    # The rest

    def _give_back(self, marked: dict[str, Any]) -> None:
        """Its claim, now that it is gone. What fails here must not keep it from being removed: claims run out."""
        from kedge.errors import CheckpointError

        from . import claims

        if claims.claim_of(marked) is None:
            return
        try:
            with self._store() as manager:
                claims.give_back(manager, marked)
        except CheckpointError as error:
            self.log(f"kedge: {marked['wish']['key']} stays claimed for a while: {error}", level="warning")

    def _store(self) -> Any:
        return marks.store_of(os.environ) if self.manager is None else nullcontext(self.manager)

    def _runc(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.real, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )

    def _status(self) -> str:
        done = self._runc(*self.call.other("state"))
        return str(json.loads(done.stdout).get("status")) if done.returncode == 0 else ""

    def _has_ended(self, marked: dict[str, Any]) -> bool:
        """Whether it was frozen and is no more; also when the call that did it was killed before it could say so."""
        if not marked.get("ended") and marked.get("ending") and not self._status():
            from kedge.containers.attempts import put_right

            put_right()
            marked["ended"] = marked.pop("ending")
            self._remember(**marked)
        return bool(marked.get("ended"))

    def _is_running(self) -> bool:
        return self._status() in ("running", "paused")

    def _recall(self) -> dict[str, Any]:
        return marks.read_mark(self.mark)

    def _remember(self, **facts: Any) -> None:
        marks.write_mark(self.mark, facts)

    def log(self, message: str, level: str = "error") -> None:
        """Where the engine looks: runc's log file, in its format, and stderr, which may be a /dev/null for reading."""
        if level != "info":
            with suppress(OSError):
                os.write(2, f"{message}\n".encode())
        path = self.call.get("log")
        if not path:
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if self.call.get("log-format") == "json":
            line = json.dumps({"level": level, "msg": message, "time": now})
        else:
            line = f'time="{now}" level={level} msg={json.dumps(message)}'
        with open(path, "a") as file:
            file.write(line + "\n")


_ACTIONS = {
    "create": Runtime.create, "run": Runtime.run, "start": Runtime.start, "kill": Runtime.kill,
    "checkpoint": Runtime.checkpoint, "state": Runtime.state, "resume": Runtime.resume, "pause": Runtime.pause,
    "delete": Runtime.delete,
}  # fmt: skip


def _is_forgotten_after_success(marked: Mapping[str, Any]) -> bool:
    return bool(marked.get("wish", {}).get("keep") == "until-success")


def give_images(images: Path, wanted: Path) -> None:
    """The caller's image path gets the images too: by hard links where that is possible."""
    from kedge.errors import storage_error

    try:
        wanted.mkdir(parents=True, exist_ok=True)
        for source in images.iterdir():
            target = wanted / source.name
            target.unlink(missing_ok=True)
            try:
                os.link(source, target)
            except OSError:  # another file system
                shutil.copy2(source, target)
    except OSError as error:
        raise storage_error("write", str(wanted), error) from error


def engine_of(root: str) -> str:
    if root.startswith("/run/containerd"):
        return "containerd"
    return "docker" if root.startswith("/run/docker") else "runc"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
