"""The process that asks the driver: one thread a GPU, so that a call that never returns holds up no other GPU, and a
process of its own, so that it holds up no one else either.

It prints one `Snapshot` a line, once a period. Its argument says what is wanted, a `Wants` in JSON; it ends when its
standard input closes, or when the driver must be loaded anew.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.gpus import nvml
from engine.gpus.reservation import Held, all_held
from engine.gpus.snapshot import LASTING, UNITS, Gpu, Instance, Missing, Process, Reading, Snapshot, State, Wants

if TYPE_CHECKING:
    from engine.gpus.processes import ProcessTable

SLOW_SECONDS = 5.0
LOOK_AROUND_SECONDS = 2.0
# So long a snapshot waits for the GPUs to answer: the first one, and each later one as a share of the period.
FIRST_SECONDS = 2.0
SHARE_OF_PERIOD = 0.4


@dataclass
class Shared:
    """What the threads of this process tell each other, under one lock: `round` counts the times that the GPUs were
    asked for, `gone` says why the driver cannot be asked any more."""

    wants: Wants
    held: list[Held] = field(default_factory=list)
    round: int = 1
    gone: str | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def give_up(self, reason: str) -> None:
        with self.changed:
            self.gone = reason
            self.changed.notify_all()


class GpuWatch(threading.Thread):
    """Asks one GPU, again and again."""

    def __init__(self, index: int, shared: Shared) -> None:
        super().__init__(name=f"gpu-{index}", daemon=True)
        self.index, self._shared = index, shared
        self.retired = self.unwanted = self.look_again = False
        self._begun = self._done = 0
        self._born = time.monotonic()
        self._answered: float | None = None
        self._published: Gpu | None = None
        self._forget()

    def _forget(self) -> None:
        """What is known of a GPU, when another may be in its place."""
        self._nvml_handle: Any = None
        self._uuid: str | None = None
        self._kept: dict[str, Reading[Any]] = {}
        self._instances: tuple[Instance, ...] = ()
        self._slow_at = float("-inf")
        self._activity = nvml.Activity()
        self._people: ProcessTable | None = None
        self._processes: Reading[tuple[Process, ...]] = Reading(None, time.time(), Missing.NOT_ASKED)
        self._processes_at = float("-inf")

    def run(self) -> None:
        while not self.retired:
            self._begun = self._shared.round
            try:
                self._published = self._poll()
            except nvml.DriverGoneError as error:
                self._shared.give_up(str(error))
                return
            except Exception as error:
                # Not to be seen as a GPU that is silent for ever.
                self._shared.give_up(f"{type(error).__name__}: {error}")
                return
            with self._shared.changed:
                self._answered, self._done = time.monotonic(), self._begun
                self._shared.changed.notify_all()
                self._shared.changed.wait_for(lambda: self.retired or self._shared.round > self._begun)

    def _poll(self) -> Gpu:
        """Query the GPU once. Any call of the driver may block for ever, and then only this thread with it."""
        wants, now = self._shared.wants, time.monotonic()
        if (reason := self._open(now)) is not None:
            return self._unanswered("lost", reason)
        handle = self._nvml_handle
        # The GPM measures from here on, while the other queries run.
        if wants.activity:
            self._activity.begin(handle)
        if self._infrequent_due(now):
            self._query_infrequent(handle, now)
        if self._kept["mig"].value == "on":
            self._instances = nvml.instances(handle)
        uuids = [self._uuid or "", *(instance.uuid for instance in self._instances)]
        if wants.gpus is not None and not set(uuids) & set(wants.gpus):
            self.unwanted = self.retired = True

        answers = self._kept | nvml.ask_load(handle) | nvml.ask_all(nvml.QUESTIONS, handle)
        if wants.links:
            answers |= nvml.ask_all(nvml.LINK_QUESTIONS, handle)
        if wants.processes and now - self._processes_at >= min(wants.period, 1.0):
            self._processes_at = now
            self._processes = self._ask_processes(handle, uuids)
        if wants.activity:
            answers |= self._activity.read(handle)
        not_asked: Reading[Any] = Reading(None, time.time(), Missing.NOT_ASKED)
        readings = {name: answers.get(name, not_asked) for name in UNITS}
        lost = Missing.LOST in (readings["busy"].reason, readings["memory_used"].reason)
        return self._gpu("lost" if lost else "ok", 0.0, time.time(), readings, self._processes)

    def _infrequent_due(self, now: float) -> bool:
        return now - self._slow_at >= SLOW_SECONDS

    def _open(self, now: float) -> str | None:
        """Get a handle, a new one now and then: another GPU may be in this one's place. Return why there is none."""
        if self.look_again:
            self.look_again, self._slow_at = False, float("-inf")
        if self._nvml_handle is not None and not self._infrequent_due(now):
            return None
        opened = nvml.open_gpu(self.index)
        if opened.value is None:
            self._nvml_handle = None
            return opened.reason or Missing.LOST
        handle, uuid = opened.value
        if uuid != self._uuid:
            self._forget()
            self._uuid = uuid
        self._nvml_handle = handle
        return None

    def _query_infrequent(self, handle: Any, now: float) -> None:
        """What hardly changes, and what never does where that is not known yet."""
        missing = {
            name: question
            for name, question in nvml.LASTING_QUESTIONS.items()
            if name not in self._kept or self._kept[name].reason == Missing.LOST
        }
        self._kept |= nvml.ask_all(missing, handle)
        self._kept |= nvml.ask_all(nvml.SLOW_QUESTIONS, handle)
        self._slow_at = now

    def _ask_processes(self, handle: Any, uuids: list[str]) -> Reading[tuple[Process, ...]]:
        # Imported while the GPM measures.
        from engine.gpus.processes import ProcessTable, ranks_on

        self._people = self._people or ProcessTable()
        listed = nvml.tenants(handle)
        ranks = ranks_on(uuids, self._shared.held)
        if listed.value is None and not ranks:
            return Reading(None, listed.time, listed.reason)
        return Reading(self._people.describe(listed.value or [], ranks), listed.time)

    def _gpu(
        self,
        state: State,
        age: float,
        when: float | None,
        readings: dict[str, Reading[Any]],
        processes: Reading[tuple[Process, ...]],
    ) -> Gpu:
        uuids = {self._uuid, *(instance.uuid for instance in self._instances)}
        runs = tuple(held.run for held in self._shared.held if uuids & set(held.gpus))
        return Gpu(self.index, self._uuid, state, age, when, readings, processes, self._instances, runs)

    def _unanswered(self, state: State, reason: str, age: float = 0.0) -> Gpu:
        """The GPU as one of which only the lasting facts are known, if those."""
        now = time.time()
        nothing: Reading[Any] = Reading(None, now, reason)
        readings = {name: self._kept.get(name, nothing) if name in LASTING else nothing for name in UNITS}
        return self._gpu(state, age, now if state == "lost" else None, readings, nothing)

    def outstanding(self) -> bool:
        """Whether an answer of this round can be hoped for: not from who is still busy with an earlier one."""
        late = self._done < self._shared.round and self._begun in (0, self._done, self._shared.round)
        return late and not self.retired

    def answered(self) -> bool:
        return self._published is not None

    def report(self) -> Gpu:
        """What is known by now, marked as stale where it is old."""
        if self._published is None or self._answered is None:
            age = time.monotonic() - self._born
            return self._unanswered("stale", f"stale: no answer for {age:.0f} s", age)
        age = time.monotonic() - self._answered
        stale = age > self._shared.wants.patience
        return self._published.silent(age) if stale else self._published.aged(age)


class DriverWatch(threading.Thread):
    """Sets the driver up, looks now and then how many GPUs there are and who holds them; keeps a thread for each."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(name="driver", daemon=True)
        self._shared = shared
        self.driver: nvml.Driver | None = None
        self.watches: list[GpuWatch] = []
        self.counted = False

    def run(self) -> None:
        try:
            self.driver = nvml.set_up()
            while True:
                self._shared.held = all_held()
                self._count(nvml.count())
                time.sleep(LOOK_AROUND_SECONDS)
        except nvml.DriverGoneError as error:
            self._shared.give_up(str(error))
        except Exception as error:
            self._shared.give_up(f"{type(error).__name__}: {error}")

    def _count(self, gpus: int) -> None:
        if gpus != len(self.watches):
            # Others may have moved up.
            for watch in self.watches:
                watch.look_again = True
        for watch in self.watches[gpus:]:
            watch.retired = True
        added = [GpuWatch(index, self._shared) for index in range(len(self.watches), gpus)]
        self.watches = self.watches[:gpus] + added
        for watch in added:
            watch.start()
        with self._shared.changed:
            self.counted = True
            self._shared.changed.notify_all()


class Sampler:
    """The main thread: asks nothing of the driver, so it always speaks in time."""

    def __init__(self, wants: Wants) -> None:
        self._shared = Shared(wants)
        self._driver = DriverWatch(self._shared)
        self._began = time.monotonic()

    def run(self) -> None:
        self._driver.start()
        self._await_answers(FIRST_SECONDS)
        while self._shared.gone is None:
            began = time.monotonic()
            self._tell(self._snapshot(None))
            self._listen(began + self._shared.wants.period)
            with self._shared.changed:
                self._shared.round += 1
                self._shared.changed.notify_all()
            self._await_answers(SHARE_OF_PERIOD * self._shared.wants.period)
        self._tell(self._snapshot(self._shared.gone))

    def _await_answers(self, seconds: float) -> None:
        def all_there() -> bool:
            outstanding = any(watch.outstanding() for watch in self._driver.watches)
            return self._shared.gone is not None or (self._driver.counted and not outstanding)

        with self._shared.changed:
            self._shared.changed.wait_for(all_there, seconds)

    def _listen(self, until: float) -> None:
        """Wait until it is time for the next snapshot; leave when nobody wants one any more."""
        while (left := until - time.monotonic()) > 0 and self._shared.gone is None:
            # Short, because that the driver is gone comes from another thread.
            if select.select([0], [], [], min(left, 0.5))[0] and not os.read(0, 4096):
                os._exit(0)

    def _snapshot(self, error: str | None) -> Snapshot:
        now = time.time()
        waits = time.monotonic() - self._began
        driver = self._driver.driver
        if driver is None and error is None:
            error = f"the NVIDIA driver has not answered for {waits:.0f} s"
        unknown: Reading[str] = Reading(None, now, error or "not known")
        gpus = [] if self._shared.gone else [one.report() for one in self._driver.watches if not one.unwanted]
        versions = (driver.version, driver.cuda) if driver and not self._shared.gone else (unknown, unknown)
        asked = self._driver.counted and all(one.answered() for one in self._driver.watches)
        pending = self._shared.gone is None and not asked
        return Snapshot(now, os.uname().nodename, *versions, tuple(gpus), error, pending=pending)

    @staticmethod
    def _tell(snapshot: Snapshot) -> None:
        data = snapshot.to_line().encode() + b"\n"
        try:
            while data:
                data = data[os.write(1, data) :]
        except OSError:
            os._exit(0)


def main() -> None:
    # The interpreter's own end would wait for no thread either, but may trip over one that is inside the driver.
    code = 1
    try:
        Sampler(Wants.from_line(sys.argv[1])).run()
        code = 0
    finally:
        os._exit(code)
