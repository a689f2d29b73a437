"""Sampler process: queries NVML and prints one `Snapshot` per line, once per period.

NVML calls can block forever. One thread per GPU keeps a blocked call from delaying the other GPUs, and the separate
process keeps it from blocking gputrain.

`start_sampler` starts the process and `monitor` reads it. The argument, and each line of standard input, is a
`SamplerOptions` in JSON. The process exits when its standard input closes, or when NVML needs to be initialized in a
new process.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.base.codec import decode, encode
from engine.gpus import nvml, nvml_processes, nvml_rates
from engine.gpus.reservation_entry import ReservationInfo
from engine.gpus.reservation_reader import read_reservations
from engine.gpus.snapshot import (
    DRIVER,
    STATIC_READINGS,
    UNITS,
    Gpu,
    GpuProcess,
    GpuState,
    Measurement,
    MigInstance,
    Missing,
    SamplerOptions,
    Snapshot,
    current_time,
    with_units,
)

if TYPE_CHECKING:
    from engine.gpus.processes import ProcessTable

INFREQUENT_INTERVAL_SECONDS = 5.0  # between queries of `nvml.INFREQUENT_QUERIES`
# Between measurements of the PCIe throughput without GPM. They take 40 ms, and the driver may serialize them.
PCIE_INTERVAL_SECONDS = 5.0
ENUMERATE_INTERVAL_SECONDS = 2.0  # between counts of the GPUs
FIRST_ANSWER_TIMEOUT_SECONDS = 2.0  # how long the first snapshot waits for the GPUs to answer
ANSWER_TIMEOUT_PERIOD_SHARE = 0.4  # the same for later snapshots, as a share of the sampling period


@dataclass
class SamplerState:
    """State shared by the threads of the sampler; `changed` is notified when it changes.

    `round` is the number of the current sampling round. `driver_error` is why NVML became unusable.
    """

    options: SamplerOptions
    reservations: list[ReservationInfo] = field(default_factory=list)
    round: int = 1
    driver_error: str | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def fail(self, error: Exception) -> None:
        """End the sampler. An unexpected error must not look like a GPU that hangs."""
        is_known = isinstance(error, nvml.DriverUnavailableError)
        with self.changed:
            self.driver_error = str(error) if is_known else f"{type(error).__name__}: {error}"
            self.changed.notify_all()


class GpuThread(threading.Thread):
    """Thread that queries one GPU once per round.

    `excluded` is set if the GPU is not one of `SamplerOptions.gpus`, `retired` ends the thread, `reopen` makes it get a
    new NVML handle.
    """

    def __init__(self, index: int, state: SamplerState) -> None:
        super().__init__(name=f"gpu-{index}", daemon=True)
        self.index, self._state = index, state
        self.retired = self.excluded = self.reopen = False
        self._round_started = self._round_completed = 0
        self._created_at = time.monotonic()
        self._answered_at: float | None = None
        self._latest: Gpu | None = None
        self._clear_cache()

    def _clear_cache(self) -> None:
        """Discard cached data. Called when the index may refer to another GPU."""
        self._nvml_handle: Any = None
        self._uuid: str | None = None
        self._cached_readings: dict[str, Measurement[Any]] = {}
        self._mig_devices: list[tuple[Any, MigInstance]] = []
        self._mig_gpm: dict[int, nvml_rates.GpmReader] = {}
        self._infrequent_at = float("-inf")
        self._gpm = nvml_rates.GpmReader()
        # The first snapshot does not wait for it.
        self._pcie_at = time.monotonic()
        self._pcie_readings: dict[str, Measurement[Any]] = {}
        self._process_table: ProcessTable | None = None
        self._process_activity = nvml_processes.ProcessActivity()
        self._processes: Measurement[tuple[GpuProcess, ...]] = Measurement(None, current_time(), Missing.NOT_REQUESTED)
        self._processes_at = float("-inf")

    def run(self) -> None:
        while not self.retired:
            self._round_started = self._state.round
            try:
                self._latest = self._poll()
            except Exception as error:
                self._state.fail(error)
                return
            with self._state.changed:
                self._answered_at, self._round_completed = time.monotonic(), self._round_started
                self._state.changed.notify_all()
                self._state.changed.wait_for(lambda: self.retired or self._state.round > self._round_started)

    def _poll(self) -> Gpu:
        """Query the GPU once. Any NVML call may block this thread forever."""
        options, now = self._state.options, time.monotonic()
        if (reason := self._open(now)) is not None:
            return self._gpu_without_readings("lost", reason)
        handle = self._nvml_handle
        # Starts the GPM sampling interval, so that the other queries run within it.
        if options.activity:
            self._gpm.start(handle)
        if self._infrequent_due(now):
            self._query_infrequent(handle, now)
        self._query_mig_devices(handle)
        uuids = [self._uuid or "", *(instance.uuid for instance in self._mig_instances)]
        # The MIG devices of a GPU may be unknown for a moment.
        without_devices = self._cached_readings["mig"].value == "on" and not self._mig_devices
        if options.gpus is not None and not set(uuids) & set(options.gpus) and not without_devices:
            self.excluded = self.retired = True

        answers = (
            self._cached_readings
            | nvml.query_utilization_and_memory(handle)
            | nvml.query_all(nvml.PERIODIC_QUERIES, handle)
        )
        if options.processes and now - self._processes_at >= min(options.period, 1.0):
            self._processes_at = now
            self._processes = self._query_processes(handle, uuids, answers["util"])
        if options.activity:
            answers |= self._gpm.read(handle)
            self._query_mig_activity(handle)
            if answers["pcie_sent"].value is None:
                answers |= self._query_pcie(handle)
        if answers["integrated"].value:
            # The driver reports PCIe 1.0 x1 for GB10, which is connected to its CPU otherwise.
            answers |= {name: answers[name].without_value(Missing.INTEGRATED) for name in answers if "pcie" in name}
        not_requested: Measurement[Any] = Measurement(None, current_time(), Missing.NOT_REQUESTED)
        readings = {name: answers.get(name, not_requested) for name in UNITS}
        lost = Missing.LOST in (readings["util"].reason, readings["memory_used"].reason)
        return self._build_gpu("lost" if lost else "ok", 0.0, current_time(), readings, self._processes)

    @property
    def _mig_instances(self) -> tuple[MigInstance, ...]:
        return tuple(instance for _, instance in self._mig_devices)

    def _query_mig_devices(self, handle: Any) -> None:
        """Query the MIG devices and their memory, and start the GPM sampling interval of their GPU instances."""
        self._mig_devices = nvml.mig_devices(handle) if self._cached_readings["mig"].value == "on" else []
        gpu_instances = {instance.gpu_instance for instance in self._mig_instances}
        self._mig_gpm = {number: self._mig_gpm.get(number) or nvml_rates.GpmReader(number) for number in gpu_instances}
        if self._state.options.activity:
            for reader in self._mig_gpm.values():
                reader.start(handle)

    def _query_mig_activity(self, handle: Any) -> None:
        """Add the activity of the GPU instances to the MIG devices."""
        activity = {number: reader.read(handle) for number, reader in self._mig_gpm.items()}
        self._mig_devices = [
            (mig_handle, instance.with_activity(activity[instance.gpu_instance]))
            for mig_handle, instance in self._mig_devices
        ]

    def _query_pcie(self, handle: Any) -> dict[str, Measurement[Any]]:
        """Return the PCIe throughput of a GPU without GPM."""
        if (now := time.monotonic()) - self._pcie_at >= PCIE_INTERVAL_SECONDS:
            self._pcie_at, self._pcie_readings = now, nvml.query_all(nvml.PCIE_QUERIES, handle)
        return self._pcie_readings

    def _infrequent_due(self, now: float) -> bool:
        return now - self._infrequent_at >= INFREQUENT_INTERVAL_SECONDS

    def _open(self, now: float) -> str | None:
        """Get an NVML handle if there is none, and renew it periodically, because the index may refer to another GPU.

        Return the reason if there is no handle.
        """
        if self.reopen:
            self.reopen, self._infrequent_at = False, float("-inf")
        if self._nvml_handle is not None and not self._infrequent_due(now):
            return None
        reading = nvml.query(nvml.open_gpu, self.index)
        if reading.value is None:
            self._nvml_handle = None
            return reading.reason or Missing.LOST
        handle, uuid = reading.value
        if uuid != self._uuid:
            self._clear_cache()
            self._uuid = uuid
        self._nvml_handle = handle
        return None

    def _query_infrequent(self, handle: Any, now: float) -> None:
        """Query readings that rarely change, and static readings that are still missing."""
        missing = {
            name: call
            for name, call in nvml.STATIC_QUERIES.items()
            if name not in self._cached_readings or self._cached_readings[name].reason == Missing.LOST
        }
        self._cached_readings |= nvml.query_all(missing, handle)
        self._cached_readings |= nvml.query_all(nvml.INFREQUENT_QUERIES, handle)
        self._infrequent_at = now

    def _query_processes(
        self, handle: Any, uuids: list[str], util: Measurement[int]
    ) -> Measurement[tuple[GpuProcess, ...]]:
        # Imported here so that psutil's import runs during the GPM sampling interval.
        from engine.gpus.processes import ProcessTable, ranks_on

        self._process_table = self._process_table or ProcessTable()
        listed = nvml_processes.running_processes(handle, self._mig_devices)
        ranks = ranks_on(uuids, self._state.reservations)
        if listed.value is None and not ranks:
            return Measurement(None, listed.time, listed.reason)
        idle = self._process_activity.update(handle, util, [process.pid for process in listed.value or ()])
        return Measurement(self._process_table.describe(listed.value or [], ranks, idle), listed.time)

    def _build_gpu(
        self,
        state: GpuState,
        age: float,
        time_s: float | None,
        readings: dict[str, Measurement[Any]],
        processes: Measurement[tuple[GpuProcess, ...]],
    ) -> Gpu:
        uuids = {self._uuid, *(instance.uuid for instance in self._mig_instances)}
        holders = [reservation for reservation in self._state.reservations if reservation.holds(*uuids)]
        return Gpu(
            index=self.index,
            uuid=self._uuid,
            state=state,
            age=round(age, 3),
            time=time_s,
            **with_units(readings),
            processes=processes,
            instances=self._mig_instances,
            runs=tuple(holder.run for holder in holders),
            run_owners={holder.run: holder.user for holder in holders if holder.uid != os.geteuid()},
            reserved_by_runs=sum(holder.min_free for holder in holders),
        )

    def _gpu_without_readings(self, state: GpuState, reason: str, age: float = 0.0) -> Gpu:
        """Return the GPU with only its cached static readings."""
        now = current_time()
        missing: Measurement[Any] = Measurement(None, now, reason)
        readings = {
            name: self._cached_readings.get(name, missing) if name in STATIC_READINGS else missing for name in UNITS
        }
        return self._build_gpu(state, age, now if state == "lost" else None, readings, missing)

    def has_pending_answer(self) -> bool:
        """Whether an answer in this round is outstanding. A thread blocked in an earlier round does not count."""
        not_completed = self._round_completed < self._state.round and self._round_started in (
            0,
            self._round_completed,
            self._state.round,
        )
        return not_completed and not self.retired

    def has_answered(self) -> bool:
        return self._latest is not None

    def report(self) -> Gpu:
        """Return the latest answer, marked stale if it is too old."""
        if self._latest is None or self._answered_at is None:
            age = time.monotonic() - self._created_at
            return self._gpu_without_readings("stale", f"stale: no answer for {age:.0f} s", age)
        age = time.monotonic() - self._answered_at
        return self._latest.aged(age, self._state.options.stale_after_s)


class DriverThread(threading.Thread):
    """Initializes NVML, periodically counts the GPUs and reads their reservations, and runs a thread per GPU."""

    def __init__(self, state: SamplerState) -> None:
        super().__init__(name="driver", daemon=True)
        self._state = state
        self.versions: tuple[Measurement[str], Measurement[str]] | None = None
        """Versions of the driver and of CUDA."""
        self.gpu_threads: list[GpuThread] = []
        self.enumerated = False

    def run(self) -> None:
        try:
            self.versions = nvml.initialize()
            while True:
                self._state.reservations = read_reservations()
                self._update_gpu_threads(nvml.gpu_count())
                time.sleep(ENUMERATE_INTERVAL_SECONDS)
        except Exception as error:
            self._state.fail(error)

    def _update_gpu_threads(self, gpu_count: int) -> None:
        if gpu_count != len(self.gpu_threads):
            # The indices of the other GPUs may have shifted.
            for thread in self.gpu_threads:
                thread.reopen = True
        for thread in self.gpu_threads[gpu_count:]:
            thread.retired = True
        added = [GpuThread(index, self._state) for index in range(len(self.gpu_threads), gpu_count)]
        self.gpu_threads = self.gpu_threads[:gpu_count] + added
        for thread in added:
            thread.start()
        with self._state.changed:
            self.enumerated = True
            self._state.changed.notify_all()


class GpuSampler:
    """The main thread. It makes no NVML call, so it always prints on time."""

    def __init__(self, options: SamplerOptions) -> None:
        self._state = SamplerState(options)
        self._driver_thread = DriverThread(self._state)
        self._started_at = time.monotonic()

    def run(self) -> None:
        self._driver_thread.start()
        self._await_answers(FIRST_ANSWER_TIMEOUT_SECONDS)
        while self._state.driver_error is None:
            began = time.monotonic()
            self._emit(self._snapshot(None))
            self._await_next_round(began + self._state.options.period)
            with self._state.changed:
                self._state.round += 1
                self._state.changed.notify_all()
            self._await_answers(ANSWER_TIMEOUT_PERIOD_SHARE * self._state.options.period)
        self._emit(self._snapshot(self._state.driver_error))

    def _await_answers(self, timeout_s: float) -> None:
        def all_answered() -> bool:
            outstanding = any(thread.has_pending_answer() for thread in self._driver_thread.gpu_threads)
            return self._state.driver_error is not None or (self._driver_thread.enumerated and not outstanding)

        with self._state.changed:
            self._state.changed.wait_for(all_answered, timeout_s)

    def _await_next_round(self, deadline: float) -> None:
        """Wait until `deadline`, the time of the next snapshot, or until standard input has other options. Exit the
        process when it closes."""
        while (left := deadline - time.monotonic()) > 0 and self._state.driver_error is None:
            # A short timeout, because select() does not wake up when another thread sets driver_error.
            if select.select([0], [], [], min(left, 0.5))[0]:
                lines = os.read(0, 4096).splitlines()
                if not lines:
                    os._exit(0)
                self._state.options = decode(lines[-1], SamplerOptions)
                return

    def _snapshot(self, error: str | None) -> Snapshot:
        now = current_time()
        waited_s = time.monotonic() - self._started_at
        versions = self._driver_thread.versions
        if versions is None and error is None:
            error = f"the NVIDIA driver has not answered for {waited_s:.0f} s"
        unknown: Measurement[str] = Measurement(None, now, error or "unknown")
        threads = [] if self._state.driver_error else self._driver_thread.gpu_threads
        gpus = tuple(thread.report() for thread in threads if not thread.excluded)
        driver, cuda = versions if versions and not self._state.driver_error else (unknown, unknown)
        all_answered = self._driver_thread.enumerated and all(
            thread.has_answered() for thread in self._driver_thread.gpu_threads
        )
        pending = self._state.driver_error is None and not all_answered
        host = os.uname().nodename
        return Snapshot(
            time=now, source=DRIVER, host=host, driver=driver, cuda=cuda, error=error, pending=pending, gpus=gpus
        )

    @staticmethod
    def _emit(snapshot: Snapshot) -> None:
        data = encode(snapshot) + b"\n"
        try:
            while data:
                data = data[os.write(1, data) :]
        except OSError:
            os._exit(0)


def main() -> None:
    # Interpreter shutdown may crash while a daemon thread is inside an NVML call; os._exit() skips it.
    code = 1
    try:
        GpuSampler(decode(sys.argv[1], SamplerOptions)).run()
        code = 0
    finally:
        os._exit(code)
