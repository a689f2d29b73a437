"""Current state of a run, derived from its events, and when it stops early.

The recorder keeps it for the record of the run (`engine.runs.run_record`); the log and the run screen read it. Each
rank of `engine.train.loop` has an `EarlyStop` and passes it the same value, so all ranks decide alike.
`engine.jobs.launch.ranks` replays the epochs of a finished run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from engine.base.codec import or_none, replace
from engine.base.text import pluralize
from engine.config.monitor import DEFAULT_MONITOR
from engine.runs.bottleneck import (
    STRAGGLER_EPOCHS,
    GpuStats,
    GpuThrottling,
    diagnose,
    model_flops_utilization,
    valid_share,
)
from engine.runs.command_events import CodeChanged, CodeRecorded, CommandStarted
from engine.runs.events import (
    AtStep,
    ControlEvent,
    EpochEvent,
    Event,
    FinalTest,
    GpuEvent,
    GpusGranted,
    PhaseChanged,
    RankFailed,
    RunContinued,
    RunFinished,
    RunPaused,
    RunResumed,
    RunStarted,
    SessionStarted,
    StepEvent,
    WaitingForGpus,
    WarningEvent,
)
from engine.runs.folder import RunState, final_state
from engine.runs.metrics import Metric, values_of
from engine.runs.monitor import monitor_of
from engine.runs.records import Bottleneck, CodeSummary
from engine.runs.run_record import RunRecord

if TYPE_CHECKING:
    from engine.config.run_sections import RunConfig


class EarlyStop:
    """Counts the epochs since the last gain of the metric that selects the best epoch.

    A value is a gain if its merit exceeds `reference`, that of the last gain, by more than `run.early_stop_min_delta`.
    """

    def __init__(self, run: RunConfig, monitor: Metric) -> None:
        self._monitor, self._patience, self._min_delta = monitor, run.early_stop, run.early_stop_min_delta
        self.reference, self.stale_epochs = -math.inf, 0

    @property
    def expired(self) -> bool:
        """Whether training ends: there was no gain for `run.early_stop` epochs."""
        return 0 < self._patience <= self.stale_epochs

    def step(self, value: float | None) -> None:
        """Add the value of the next epoch. NaN and None count as no improvement."""
        merit = self._monitor.merit(value)
        if merit > self.reference + self._min_delta:
            self.reference, self.stale_epochs = merit, 0
        else:
            self.stale_epochs += 1

    def state_dict(self) -> dict[str, float]:
        """Return the progress for a checkpoint; patience and least gain come from the current config."""
        return {"reference": self.reference, "stale_epochs": self.stale_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the progress that `state_dict` returned."""
        self.reference = float(state["reference"])
        self.stale_epochs = int(state["stale_epochs"])


def has_stopped_early(run: RunConfig, history: History) -> bool:
    """Whether a run with the epochs of this history has nothing left to train."""
    early_stop = EarlyStop(run, history.monitor)
    for epoch in history.epochs:
        early_stop.step(history.monitor.of_epoch(epoch))
    return early_stop.expired


def describe_run_devices(started: SessionStarted) -> str:
    """Return the devices of a run by name, such as `2 x H200 (GPU 0, 3)`, `the CPU` or `16 x H200 on 2 hosts`."""
    if set(started.devices) <= {"cpu"}:
        ranks = started.world_size if isinstance(started, RunStarted) else 1
        return "the CPU" if ranks <= 1 else f"the CPU ({ranks} ranks)"
    names = [record.name.removeprefix("NVIDIA ") for record in started.ranks]
    if not names or not all(names):
        return pluralize(len(started.devices), "GPU")
    hosts = {record.host for record in started.ranks}
    groups = []
    for name in dict.fromkeys(names):
        indices = [record.index for record, other in zip(started.ranks, names, strict=True) if other == name]
        count = f"{len(indices)} x {name}" if len(names) > 1 else name
        is_numbered = len(hosts) == 1 and None not in indices
        groups.append(f"{count} (GPU {', '.join(map(str, indices))})" if is_numbered else count)
    return " and ".join(groups) + (f" on {len(hosts)} hosts" if len(hosts) > 1 else "")


def fully_trained_epochs(started: RunStarted | None, session: Sequence[EpochEvent]) -> list[EpochEvent]:
    """Return the epochs of a session that it trained from their first to their last step."""
    epochs = [epoch for epoch in session if (epoch.images_per_second or 0) > 0 and (epoch.seconds or 0) > 0]
    if isinstance(started, RunResumed) and started.steps_per_epoch > 0 and started.from_step % started.steps_per_epoch:
        partial = started.from_step // started.steps_per_epoch + 1
        epochs = [epoch for epoch in epochs if epoch.epoch != partial]
    return epochs


def mean_epoch_seconds(epochs: Sequence[EpochEvent]) -> float | None:
    """Return the mean duration of these epochs, in seconds; None without any."""
    return round(fmean(epoch.seconds for epoch in epochs), 3) if epochs else None


# Events of the ranks are recorded up to seconds after later ones of the supervisor.
CLOCK_STEP_SECONDS = 10.0
MAX_ETA_SECONDS = 1e12


@dataclass
class History:
    """State of a run, updated by `add` with each event in journal order."""

    started: RunStarted | None = None
    command: CommandStarted | None = None
    """The start of the command, if the run is that of another program; `started` is None then."""
    code: CodeSummary | None = None  # that of `RunRecord.code`
    epochs: list[EpochEvent] = field(default_factory=list)
    latest_step: StepEvent | None = None
    tested: FinalTest | None = None
    stopping: bool = False
    paused: bool = False
    failures: list[RankFailed] = field(default_factory=list)
    finished: RunFinished | None = None
    waiting: WaitingForGpus | None = None
    """Why the run waits in the queue; None if it does not."""
    granted: bool = False
    """Whether it has its GPUs, and its ranks start."""
    seconds: float = 0.0
    gpus: dict[str, GpuStats] = field(default_factory=dict)
    latest_gpus: GpuEvent | None = None
    cpu_fallback: str = ""
    """Same as `RunRecord.cpu_fallback`."""
    steps_done: int = 0
    """Number of completed optimizer steps, by the latest event that names a step."""
    current_epoch: int = 0
    """Epoch of that event, counted from 1."""
    session_time: float | None = None
    """When the latest session started to train, or the first one to wait, in Unix seconds."""
    saving: bool = False
    """Whether a checkpoint is being written."""
    _epoch_phase: str = ""
    _session_epochs: int = 0
    """Number of epochs of earlier sessions in `epochs`."""
    _session_start: float | None = None
    _latest_time: float = 0.0

    def add(self, event: Event) -> None:
        """Update the state with the next event."""
        self._advance(event)
        if self.session_time is None or isinstance(event, SessionStarted):
            self.session_time = event.time
        match event:
            case WaitingForGpus():
                # A session that crashed before the wait does not include it.
                self._end_session()
                self.waiting = event
            case GpusGranted():
                self.waiting, self.granted = None, True
            case RunStarted():
                self.started, self.latest_step, self.tested = event, None, None
                self._begin_session(event)
                if isinstance(event, RunResumed):
                    self.epochs = [epoch for epoch in self.epochs if epoch.step <= event.from_step]
                self._session_epochs = len(self.epochs)
            case CommandStarted():
                self.command = event
                self._begin_session(event)
            case CodeRecorded():
                self.code = event.code
            case CodeChanged() if self.code is not None:
                self.code = replace(self.code, changed=event.message)
            case StepEvent():
                self.latest_step = event
            case EpochEvent():
                self.epochs.append(event)
            case FinalTest():
                self.tested = event
            case GpuEvent():
                self.latest_gpus = event
                for sample in event.gpus:
                    self.gpus.setdefault(str(sample.uuid), GpuStats()).add(sample, event.time)
            case WarningEvent(cpu_fallback=True):
                self.cpu_fallback = event.message
            case ControlEvent():
                self.stopping = self.stopping or event.request == "stop"
            case RunPaused():
                self.paused = True
            case RunContinued():
                self.paused = False
            case RankFailed():
                self.failures.append(event)
            case RunFinished():
                self.finished, self.waiting, self.granted = event, None, False
        if (
            self._session_start is not None
            and event.time < self._latest_time - CLOCK_STEP_SECONDS
            and not isinstance(event, SessionStarted)
        ):
            # The clock of the host was set back during the session.
            self._session_start -= self._latest_time - event.time
        self._latest_time = event.time
        # A pause is no training: the clock stops as at the end of a session.
        if isinstance(event, RunFinished | RunPaused):
            self._end_session()
        elif isinstance(event, RunContinued):
            self._session_start = event.time

    def _begin_session(self, event: SessionStarted) -> None:
        # A session that crashed has no run_finished event; it ends with its last event.
        self._end_session()
        self._session_start = event.time
        self.finished, self.waiting, self.granted = None, None, False
        if set(event.devices) != {"cpu"}:
            self.cpu_fallback = ""
        self.stopping = self.paused = False
        self.failures.clear()
        for stats in self.gpus.values():
            stats.throttling = None

    def _advance(self, event: Event) -> None:
        """Update phase, step and epoch."""
        match event:
            case RunResumed():
                self.steps_done = event.from_step
                self.current_epoch = event.from_step // event.steps_per_epoch + 1 if event.steps_per_epoch > 0 else 0
                self._epoch_phase = ""
            case AtStep():
                # A group of steps may be reported after a later event.
                if event.step >= self.steps_done:
                    self.steps_done, self.current_epoch = event.step, max(event.epoch, self.current_epoch)
        if isinstance(event, PhaseChanged) and event.phase != "saving":
            self._epoch_phase = event.phase
        if not isinstance(event, GpuEvent | ControlEvent):
            self.saving = isinstance(event, PhaseChanged) and event.phase == "saving"

    @property
    def phase(self) -> str:
        """What the ranks do: training, validating or saving; "" if the journal does not name it."""
        return "saving" if self.saving else self._epoch_phase

    def _end_session(self) -> None:
        if self._session_start is not None:
            self.seconds += max(self._latest_time - self._session_start, 0.0)
            self._session_start = None

    @property
    def monitor(self) -> Metric:
        """The metric that selects the best epoch."""
        started = self.started
        return monitor_of(DEFAULT_MONITOR) if started is None else monitor_of(started.monitor, started.monitor_mode)

    @property
    def best(self) -> EpochEvent | None:
        """Best epoch, see `Metric.best_of`."""
        return self.monitor.best_of(self.epochs)

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds to the end of the run by the median epoch of this session; None if unknown."""
        if self.started is None or not self.started.steps_per_epoch:
            return None
        epoch_s = 0.0
        session = self.epochs[self._session_epochs :] or self.epochs
        if durations := [epoch.seconds for epoch in session if epoch.seconds > 0]:
            epoch_s = statistics.median(durations)
        elif self.latest_step is not None and self.latest_step.images_per_second > 0:
            images = self.started.steps_per_epoch * self.started.global_batch
            epoch_s = images / self.latest_step.images_per_second
        eta_s = max(self.started.epochs - self.steps_done / self.started.steps_per_epoch, 0.0) * epoch_s
        return eta_s if epoch_s and eta_s <= MAX_ETA_SECONDS else None

    @property
    def latest_session_epoch(self) -> EpochEvent | None:
        """Latest epoch of this session. Earlier sessions may have used other devices, so their speed does not count."""
        return self.epochs[-1] if self.started and len(self.epochs) > self._session_epochs else None

    @property
    def bottleneck(self) -> Bottleneck | None:
        """What limits the run; None if unknown."""
        session = self.epochs[self._session_epochs :] if self.started else []
        return diagnose(self.started, session[-STRAGGLER_EPOCHS:], self.throttling)

    @property
    def full_session_epochs(self) -> list[EpochEvent]:
        """Epochs that this session trained from start to end."""
        return fully_trained_epochs(self.started, self.epochs[self._session_epochs :])

    @property
    def throttling(self) -> dict[str, GpuThrottling]:
        """Ongoing throttling by GPU UUID."""
        return {uuid: stats.throttling for uuid, stats in self.gpus.items() if stats.throttling is not None}

    @property
    def data_wait(self) -> float | None:
        """Share of the training time that the ranks waited for data in the latest epoch, 0 to 1. During the first epoch
        of a session, the share of rank 0 in its latest steps."""
        return valid_share(
            self.latest_session_epoch.data_wait
            if self.latest_session_epoch
            else self.latest_step.data_wait
            if self.latest_step
            else None
        )

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization of the latest epoch, 0 to 1."""
        return model_flops_utilization(self.started, self.latest_session_epoch)

    @property
    def total_seconds(self) -> float:
        """Duration of all sessions together, without pauses, up to the latest event."""
        running = self._latest_time - self._session_start if self._session_start is not None else 0.0
        return self.seconds + max(running, 0.0)

    @property
    def state(self) -> RunState:
        """State of the run while its owner lives."""
        if self.waiting is not None:
            return RunState.WAITING
        if self.finished is not None and not self.granted:
            return final_state(self.finished.state)
        if (self.started or self.command) is None or self.granted or self.failures:
            # A failure without a run_finished event means that the ranks are restarting.
            return RunState.STARTING
        if self.stopping:
            return RunState.STOPPING
        return RunState.PAUSED if self.paused else RunState.RUNNING

    @property
    def message(self) -> str:
        """Why the run waits, or why or with which result it ended; "" while it trains."""
        event = self.waiting or self.finished
        return "" if event is None else event.message

    @property
    def trains(self) -> bool:
        """Whether the ranks train."""
        return self.state in (RunState.RUNNING, RunState.STOPPING)

    @property
    def rate_now(self) -> float | None:
        """Latest training throughput, in images/s over all ranks; None unless it trains."""
        latest = self.latest_step or self.latest_session_epoch
        return latest.images_per_second if self.trains and latest is not None else None

    def record(self, config: Mapping[str, Any] | None = None) -> RunRecord:
        """Return the record of the run, with its changed config values by `section.key`; None if they are unknown."""
        started, state = self.started, self.state
        record = RunRecord(
            state=state,
            message=self.message,
            values=values_of(self),
            current_epoch=self.current_epoch,
            phase=self.phase if state.live else "",
            bottleneck=self.bottleneck,
            seconds_per_epoch=mean_epoch_seconds(self.full_session_epochs),
            started_at=self.session_time,
            updated_at=self._latest_time or None,
            config=None if config is None else dict(config),
            code=self.code,
            cpu_fallback=self.cpu_fallback,
        )
        if (start := self.command or started) is not None:
            record = replace(
                record,
                host=start.host,
                devices=describe_run_devices(start),
                rank_devices=start.ranks,
                versions=start.versions,
            )
        if self.command is not None:
            return replace(
                record,
                command=self.command.command,
                command_parameters=self.command.parameters,
                exit_code=None if self.finished is None else or_none(self.finished.exit_code),
            )
        if started is None:
            return record
        return replace(
            record,
            # A checkpoint after the last epoch is at the beginning of the next one.
            current_epoch=min(self.current_epoch, started.epochs),
            train_images=started.train_images,
            val_images=started.val_images,
            classes=started.classes,
            monitor=started.monitor,
            monitor_mode=started.monitor_mode,
        )


def history_from_events(events: Iterable[Event]) -> History:
    """Return the state of a run after the given events."""
    history = History()
    for event in events:
        history.add(event)
    return history
