"""A worker of queues: takes entries, carries out their runs in threads, and takes over the runs of workers that died.

take        the lease of the run; whoever has it has the entry. Then the entry is looked at again, and marked running
carry out   as any run: a worker that was suspended, and whose run was taken over, is refused at its next write (I5)
end         the end of the run is durable, and the entry goes in the same transaction. That of a group, or over HTTP,
            goes afterwards; in between, another worker finds the run ended
take over   an entry that is marked running, and whose run has no lease: its worker died. One that kills its workers
            again and again is given up (dead), with its history in the run. Runs on which two workers died are carried
            out one at a time in each worker: so it is not the neighbours of such a run that are given up
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial

from kedge.errors import Cancelled, Conflict, Denied, LeaseHeld, LeaseLost, NoSpace, NotFound, StorageError, Unavailable
from kedge.manager import CheckpointManager
from kedge.model import CheckpointId, Lease
from kedge.ports import Mark, Stored, Then, Unmet

from .background import stop_background
from .candidates import LOOK_EVERY_S, Candidates
from .declaration import Pipeline
from .delays import Delays
from .entries import (
    DEAD,
    DELAYED,
    HELD,
    READY,
    RECOVERY,
    RUNNING,
    Entry,
    after_key,
    drop_entry,
    drop_replaced,
    entries_of,
    facts_of,
    queue_job,
    queue_of,
    ready,
    save_entry,
    schedule_job,
    shown_call,
)
from .failure import one_line
from .groups import active_tags, advance, advance_all
from .heartbeat import Heartbeat
from .leases import Leases
from .limits import QueueLimits
from .origin import has_ended_since
from .owner import take_lease
from .repertoire import Repertoire
from .retry import Retry
from .run import Run
from .schedules import fire
from .session_start import Takeover, first_lease
from .signals import Paused

IDLE_S = 1.0
RECOVER_EVERY = 0.5  # leases: how often runs of dead workers are looked for
LOOK_AGAIN_S = 30.0  # at a run that waits for somebody
MAX_TAKEOVERS = 5
_ENDS = "the worker ends"
_TURNS = 100  # held entries that are looked at in one search

Report = Callable[[str, str], None]  # (run, what became of it)


class Worker:
    """One process at work on queues."""

    def __init__(
        self,
        store: CheckpointManager,
        queues: Sequence[str],
        pipelines: Mapping[str, Pipeline[..., object]],
        *,
        concurrency: int = 1,
        lease_s: float = 10.0,
        grace_s: float = 30.0,
        max_takeovers: int = MAX_TAKEOVERS,
        backoff: Retry | None = None,
        report: Report = lambda run, text: None,
    ) -> None:
        self._store = store
        self._jobs = [queue_job(name) for name in queues]
        self._schedules = [schedule_job(name) for name in queues]
        self._limits = {
            queue_job(name): QueueLimits(store, name, partial(self._tell, f"queue {name}")) for name in queues
        }
        self._pipelines = Repertoire(store, pipelines, self._tell)
        self._concurrency = concurrency
        self._lease_s = lease_s
        self._leases = Leases(store, lease_s)
        self._grace_s = grace_s
        self._max_takeovers = max_takeovers
        self._backoff = backoff or Retry()
        self._report = report
        self._lock = threading.Lock()
        self._at_work: dict[str, Run | None] = {}  # by ID of the entry
        self._delayed = {job: Delays(store, job) for job in (*self._schedules, *self._jobs)}
        self._suspect = ""  # ID of the entry at work on which more than one worker has died
        self._recover_at = 0.0
        self._recovered_to: dict[str, int] = {}  # where the search for dead workers was broken off
        self._turns_to: dict[str, int] = {}  # where that for groups without a turn was
        self._candidates = Candidates(store, self._jobs, self._delayed, self._pipelines, self._limits, concurrency)
        self._is_held_back = False  # by the limits of a queue or an outage, at the last look
        self._outages = 0  # of the store, that ended runs one after another
        self._rests_until = 0.0  # after an outage
        self._wake = threading.Event()
        self._stopping = ""
        self.is_stopping_runs = False  # the grace period is over
        self._heartbeat = Heartbeat(store, queues, concurrency)

    def stop(self, reason: str) -> None:
        """Take nothing more; runs at work end, or pause before their next step when the grace period is over."""
        self._stopping = reason
        self._wake.set()

    def serve(self, *, until_empty: bool = False) -> None:
        """Work until `stop`; with `until_empty` until there is nothing to be done, now or later."""
        is_at_rest = True
        with (
            self._leases.renewed(),
            ThreadPoolExecutor(self._concurrency, thread_name_prefix="kedge-worker") as threads,
        ):
            try:
                while not self._stopping:
                    self._wake.clear()
                    try:
                        self._heartbeat.beat()
                        seen = self._store.events(limit=1, newest=True) if is_at_rest else None
                        self._recover(threads)
                        count = self._take(threads, is_thorough=is_at_rest)
                        is_at_rest = not count and self._is_at_rest()
                        if not is_at_rest:
                            self._wake.wait(self._candidates.next_look_s(self._is_held_back or self._is_full()))
                        elif seen is None:
                            continue  # and look once more, at all there is: what comes later is news
                        elif until_empty and self._is_idle():
                            return
                        else:
                            self._wait_for_news(seen[-1].id if seen else 0)
                    except (Unavailable, NoSpace) as error:  # it comes back; somebody makes room
                        self._tell("the store", f"cannot be used now: {error}")
                        self._wake.wait(IDLE_S)
            finally:
                self._let_end()
        self._heartbeat.end()

    def _tell(self, run: str, text: str) -> None:
        with suppress(Exception):  # nobody may be there to read it; no run fails by that
            self._report(run, text)

    def _wait_for_news(self, seen: int) -> None:
        """Until something changes in the store, or is due. So an idle worker asks once a second."""
        due_at = min(delayed.next_at for delayed in self._delayed.values())
        wait_s = min(IDLE_S, self._lease_s * RECOVER_EVERY, max(0.01, due_at - time.time()))
        if self._is_held_back:
            wait_s = min(wait_s, max(0.01, min(limits.waits_s() for limits in self._limits.values())))
        self._store.events(seen, limit=1, wait_s=wait_s)

    def _let_end(self) -> None:
        until = time.monotonic() + self._grace_s
        while self._at_work and time.monotonic() < until:
            self._wake.wait(LOOK_EVERY_S)
            self._wake.clear()
        with self._lock:
            self.is_stopping_runs = True
            for run in self._at_work.values():
                if run is not None:
                    run.stop(self._stopping or _ENDS)
        if self._stopping:
            stop_background(self._stopping)

    def _begin_run(self, entry: Entry, run: Run) -> None:
        with self._lock:
            self._at_work[entry.id] = run
            if self.is_stopping_runs:
                run.stop(self._stopping or _ENDS)
        run.begin()

    def _is_idle(self) -> bool:
        jobs = [job for job in self._jobs if job != queue_job(RECOVERY)]  # those are at work elsewhere
        if self._at_work or self._is_held_back or any(self._delayed[job] for job in jobs):
            return False
        return not any(
            self._store.list(job, tags={"state": state}, limit=1) for job in jobs for state in (RUNNING, HELD)
        )

    # Finding

    def _recover(self, threads: ThreadPoolExecutor) -> None:
        """Take over what dead workers were at. Runs at work elsewhere cost a look each, and no thread."""
        if time.monotonic() < max(self._recover_at, self._rests_until) or self._is_full():
            return
        for job in self._jobs:
            for entry in entries_of(self._store.walk(job, tags={"state": RUNNING}, after=self._recovered_to.get(job))):
                if self._is_full():
                    return  # goes on here as soon as a thread is free
                self._recovered_to[job] = entry.seq
                is_next = not (self._is_at_work(entry) or (entry.takeovers and self._suspect))
                if is_next and self._pipelines.has(entry, job):
                    self._take_over(threads, job, entry)
            self._recovered_to.pop(job, None)
            most = self._limits[job].current().group_concurrency
            self._turns_to[job] = advance_all(self._store, job, self._turns_to.get(job, 0), _TURNS, most)
        self._recover_at = time.monotonic() + self._lease_s * RECOVER_EVERY

    def _take_over(self, threads: ThreadPoolExecutor, job: str, entry: Entry) -> None:
        with suppress(LeaseHeld), ExitStack() as stack:
            lease = stack.enter_context(self._lease_of(entry))
            if stack.enter_context(self._limits[job].place(self._lease_s)):
                self._suspect = entry.id if entry.takeovers else self._suspect
                self._begin(threads, entry, partial(self._work, job, entry, stack.pop_all(), lease))

    def _take(self, threads: ThreadPoolExecutor, *, is_thorough: bool) -> int:
        """Begin as much as there are free threads for; answers how much."""
        count, self._is_held_back = 0, time.monotonic() < self._rests_until
        if self._is_held_back or self._is_full():
            return 0
        for job, entry, stored in self._candidates.find(is_thorough=is_thorough):
            if self._is_full() or time.monotonic() < self._rests_until:
                break
            if not self._is_at_work(entry) and (job in self._schedules or self._pipelines.has(entry, job)):
                if (admission := self._admit(job, entry.group)) is None:
                    self._is_held_back = True
                    continue  # it stays where it is
                self._begin(threads, entry, partial(self._work, job, entry, admission, stored=stored))
                count += 1
            self._delayed[job].take(entry)
        self._is_held_back |= self._candidates.are_held_back
        if self._is_held_back:
            self._candidates.look_soon()
        return count

    def _admit(self, job: str, group: str) -> ExitStack | None:
        """What a run that begins now holds until it ends; None when the limits of its queue are reached."""
        if (limits := self._limits.get(job)) is None or limits.are_none():
            return ExitStack()
        if limits.is_full():
            return None
        with ExitStack() as stack:
            is_admitted = stack.enter_context(limits.place(self._lease_s)) and limits.may_begin(group)
            return stack.pop_all() if is_admitted else None

    def _is_at_work(self, entry: Entry) -> bool:
        with self._lock:
            return entry.id in self._at_work

    def _is_at_rest(self) -> bool:
        """Whether nothing was at work during the last look: it took all that it may, and left nothing for want of a
        thread."""
        with self._lock:
            return not self._at_work and not self._wake.is_set()

    def _is_full(self) -> bool:
        with self._lock:
            return len(self._at_work) >= self._concurrency

    # Carrying out

    def _begin(self, threads: ThreadPoolExecutor, entry: Entry, work: Callable[[], None]) -> None:
        with self._lock:
            self._at_work[entry.id] = None
        threads.submit(work)

    def _work(
        self, job: str, entry: Entry, held: ExitStack, lease: Lease | None = None, stored: Stored | None = None
    ) -> None:
        """In a thread. `held` is given back at the end; with it the run's lease, if the caller has that."""
        try:
            with held:
                if lease is None and job not in self._schedules and self._begin_quickly(job, entry, held, stored):
                    return
                lease = lease or held.enter_context(self._lease_of(entry))
                if job in self._schedules:
                    self._fire(entry)
                elif (current := self._look_again(entry)) is not None:
                    self._carry_out(job, *current, lease)
        except LeaseHeld:
            self._candidates.collide()
            self._delayed[job].put_back(entry, self._lease_s)  # if that ends badly, it is still due
        except LeaseLost:
            self._tell(entry.key, "was taken over by another worker")
        except Exception as error:  # noqa: BLE001 - whatever it is, the entry stays, and somebody reads of it
            if isinstance(error, StorageError):
                self._rest()
            self._delayed[job].put_back(entry, IDLE_S)
            self._tell(entry.key, f"cannot be carried out now: {one_line(error)}")
        finally:
            self._candidates.end(entry)
            if entry.id == self._suspect:
                self._suspect, self._recover_at = "", 0.0  # the next one
            with self._lock:
                self._at_work.pop(entry.id, None)
                self._wake.set()

    def _fire(self, entry: Entry) -> None:
        for key in fire(self._store, entry.id):
            self._tell(key, "is submitted by its schedule")

    def _lease_of(self, entry: Entry) -> AbstractContextManager[Lease]:
        return take_lease(self._store, entry.key, self._lease_s, held_by=self._leases)

    def _look_again(self, entry: Entry) -> tuple[Entry, Stored] | None:
        """The entry, now that its run is ours; None if it has ended or was given up meanwhile."""
        try:
            stored = self._store.catalogue.read(entry.id)
        except NotFound:
            return None
        drop_replaced(self._store, stored[0])
        current = Entry.of(stored[0])
        return None if current is None or current.state == DEAD else (current, stored)

    def _carry_out(self, job: str, entry: Entry, stored: Stored, lease: Lease) -> None:
        try:
            has_ended = lease.token > 1 and has_ended_since(self._store, entry, stored[0])  # else nobody had it before
        except Conflict as error:  # it ended, and was another call under the same key
            self._give_up(job, entry, error.message, entry.attempts)
            return
        if has_ended:
            self._finish(job, entry)
            return
        takeovers = entry.takeovers + (entry.state == RUNNING)
        if takeovers > self._max_takeovers:
            self._give_up(job, entry, f"{takeovers} workers died at it", entry.attempts)
            return
        self._store.tag(entry.id, state=RUNNING, takeovers=str(takeovers))
        self._run(job, entry, stored, lease)

    def _begin_quickly(self, job: str, entry: Entry, held: ExitStack, stored: Stored | None) -> bool:
        """Carry out a run that nobody has begun: its lease, its beginning and the mark on its entry are one commit,
        which fails if the entry is not as it was seen. False, and nothing has happened, where it is not so simple."""
        if entry.state == RUNNING:
            return False
        try:
            stored = stored or self._store.catalogue.read(entry.id)
        except NotFound:
            return True  # it has ended
        current = Entry.of(stored[0])
        if current is None or current.state not in (READY, DELAYED) or stored[0].parent is not None:
            return self._candidates.leave_if_taken(entry)
        tags = {"state": RUNNING, "takeovers": str(current.takeovers)}
        seen = {name: value for name, value in stored[0].tags.items() if name in tags}
        hold, lease = partial(self._leases.hold, entry.key), first_lease(entry.key, self._lease_s)
        taking = Takeover(lease, lambda take: held.enter_context(hold(take)), Mark(stored[0].id, seen, tags))
        try:
            self._run(job, current, stored, taking)
        except Unmet:
            return self._candidates.leave_if_taken(entry)
        return True

    def _run(self, job: str, entry: Entry, stored: Stored, right: Lease | Takeover) -> None:
        lease, taking = (None, right) if isinstance(right, Takeover) else (right, None)
        pipeline = self._pipelines[entry.pipeline]
        call = self._store.load_stored(stored)
        run = Run(
            entry.key, store=self._store, version=pipeline.version, pipeline=pipeline.name, ttl_s=self._lease_s,
            grace_s=self._grace_s, signals=False, progress=False, timeout_s=pipeline.timeout_s, lease=lease,
            taking=taking, queue="" if job == queue_job(RECOVERY) else queue_of(job),
            origin={"entry": stored[0].metadata, "call": call, "given": shown_call(call)},
        )  # fmt: skip
        try:
            pipeline.carry_out(run, call, partial(self._begin_run, entry, run), _end(entry))
        except BaseException as error:
            if taking is not None and not run.session:
                raise  # nothing has begun
            self._after_error(job, entry, call, error)
            return
        self._outages = 0
        if entry.group:
            self._finish(job, entry)
        else:  # it ended with the run, and so did the lease
            self._leases.forget(right.lease if isinstance(right, Takeover) else right)
        self._tell(entry.key, "is completed")

    def _after_error(self, job: str, entry: Entry, call: object, error: BaseException) -> None:
        if isinstance(error, Paused):
            if self._stopping:
                self._store.tag(entry.id, state=ready(entry.priority), takeovers="0")
            else:
                self._again(job, entry, call, LOOK_AGAIN_S, entry.attempts)
            self._tell(entry.key, f"is paused ({error}); a worker of queue {queue_of(job)} continues it")
        elif isinstance(error, Unavailable | NoSpace):  # nothing is wrong with the run
            self._again(job, entry, call, self._rest(), entry.attempts)
            self._tell(entry.key, f"is put off ({one_line(error)}); it is tried again")
        elif isinstance(error, LeaseLost | StorageError):
            raise error  # it is taken over, by this worker or another one
        elif isinstance(error, Cancelled):
            self._finish(job, entry)
            self._tell(entry.key, "was cancelled")
        else:  # the pipeline's own; it is recorded with the run
            self._after_failure(job, entry, call, error)

    def _rest(self) -> float:
        """The store failed a run. So it would fail the next ones: take none for some seconds, which are answered."""
        with self._lock:
            self._outages += 1
            wait_s = self._backoff.wait_s(self._outages)
            self._rests_until = time.monotonic() + wait_s
        return wait_s

    def _after_failure(self, job: str, entry: Entry, call: object, error: BaseException) -> None:
        attempts = entry.attempts + 1
        if attempts > entry.retries or isinstance(error, Denied):
            self._give_up(job, entry, one_line(error), attempts)
            return
        self._again(job, entry, call, self._backoff.wait_s(attempts), attempts)
        self._tell(entry.key, f"failed ({one_line(error)}); it is tried again")

    def _again(self, job: str, entry: Entry, call: object, wait_s: float, attempts: int) -> None:
        """Put the entry off: a new one takes its place, so that all workers learn when it is due."""
        try:
            old = self._store.get(entry.id)
        except NotFound:
            return  # the run has ended, though its worker was not answered
        new = facts_of(old) | {"due_at": time.time() + wait_s, "attempts": attempts}
        if self._store.get_by_key(job, after_key(entry.id)) is None:  # else a worker did this, and died
            save_entry(self._store, job, new, call, after=entry.id, tags=active_tags(entry.group))
        drop_entry(self._store, entry.id)

    def _finish(self, job: str, entry: Entry) -> None:
        """The run has ended. The next one of its group has its turn, whenever this process dies."""
        if entry.group:
            self._advance(job, entry.group, leaving=entry.id)
        drop_entry(self._store, entry.id)
        if entry.group:
            self._advance(job, entry.group)  # one that was submitted just now

    def _give_up(self, job: str, entry: Entry, why: str, attempts: int) -> None:
        self._store.tag(entry.id, state=DEAD, note=why[:200], attempts=str(attempts), lane=None)
        if entry.group:
            self._advance(job, entry.group)
        self._tell(entry.key, f"is given up: {why}")

    def _advance(self, job: str, group: str, leaving: str = "") -> None:
        advance(self._store, job, group, self._limits[job].current().group_concurrency, leaving=leaving)
        self._candidates.look_soon()


def _end(entry: Entry) -> Then | None:
    """What is done in the transaction in which a run is completed. A group has to be told first that it has ended."""
    return None if entry.group else Then(delete=(CheckpointId(entry.id),), releases_lease=True)
