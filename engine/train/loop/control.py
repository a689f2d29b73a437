"""Control of one rank between two steps: requests to stop, pause, checkpoint and profile.

`loop` calls `Control.handle_requests` before each batch that all ranks have. `engine.train.distributed.agreement` makes
all ranks serve a request at the same step, `checkpoint_writer` writes the checkpoints.
"""

from __future__ import annotations

import gc
import time

import torch.distributed as dist

from engine.runs.control import RequestCounters
from engine.runs.events import RunContinued, RunPaused
from engine.train.distributed.agreement import Agreement
from engine.train.distributed.watchdog import Phase
from engine.train.loop.checkpoint_writer import CheckpointWriter
from engine.train.loop.data import TrainingData
from engine.train.loop.job import Job, Outcome
from engine.train.loop.log import TrainingLog
from engine.train.loop.model import Model
from engine.train.loop.profile import StepProfiler

# Poll interval of a paused run.
PAUSE_POLL_SECONDS = 0.1
# Steps between garbage collections, in all ranks at the same step: they would wait for one that collects alone. User
# models may create reference cycles that hold tensors.
GC_INTERVAL_STEPS = 500


class Control:
    """Stops, pauses, checkpoints and profiles that all ranks have agreed on."""

    def __init__(
        self, job: Job, data: TrainingData, model: Model, log: TrainingLog, cpu_group: dist.ProcessGroup
    ) -> None:
        self._position, self._log, self._cpu_group = data.position, log, cpu_group
        self._agreement = Agreement(cpu_group)
        self._rank = data.sampler.rank
        self.checkpoints = CheckpointWriter(job, data, model, log, cpu_group)
        self._profiler = StepProfiler(job.folder, data, log, cpu_group)
        self.is_training = False
        """Whether training steps follow, which can be profiled."""

    def handle_requests(self) -> bool:
        """Handle requests between two batches, on all ranks at the same batch; return whether to stop."""
        if self._position.step_in_epoch and self._position.step % GC_INTERVAL_STEPS == 0:
            gc.collect()
        self.checkpoints.poll()
        agreed = self._agreement(self._poll_requests)
        if self.checkpoints.is_due(agreed):
            with self._log.clock.stopped():
                self.checkpoints.serve(agreed)
        if agreed.paused and not agreed.stop:
            self._profiler.interrupt("the run was paused")
            with self._log.clock.stopped():
                agreed = self._pause(agreed)
        if agreed.profile_steps != self._profiler.served_steps and self.is_training and not agreed.stop:
            self._profiler.advance(agreed.profile_steps)
        return agreed.stop

    def _poll_requests(self) -> RequestCounters:
        """Return the requests that this rank has received; rank 0 adds those of the checkpoint timer."""
        requests = self._log.channel.poll_requests()
        if self._rank == 0 and self.checkpoints.timer_fires():
            requests.timed_checkpoints += 1
        return requests

    def _pause(self, agreed: RequestCounters) -> RequestCounters:
        """Wait until all ranks agree to continue or to stop; requested checkpoints are still written."""
        step, epoch = self._position.step, self._position.epoch
        self._log.enter_phase(Phase.PAUSED)
        self._log.wait_pending()
        self._log.emit(RunPaused(step=step, epoch=epoch))
        while agreed.paused and not agreed.stop:
            # Again, because writing a checkpoint enters another phase.
            self._log.enter_phase(Phase.PAUSED)
            time.sleep(PAUSE_POLL_SECONDS)
            self.checkpoints.poll()
            agreed = self._agreement(self._poll_requests)
            if self.checkpoints.is_due(agreed):
                self.checkpoints.serve(agreed, background=False)
        if not agreed.stop:
            self._log.emit(RunContinued(step=step, epoch=epoch))
        return agreed

    def end_train_epoch(self) -> None:
        """End the profile in progress: no training step follows in this epoch."""
        self.is_training = False
        self._profiler.interrupt("the epoch ended")

    def end_run(self, outcome: Outcome) -> None:
        """Write the checkpoint of a stopped run, and wait for all ranks."""
        self._agreement.wait_pending()
        self._profiler.interrupt("the run ended", is_last=True)
        if outcome == "stopped":
            self.checkpoints.write_before_stop()
        self.checkpoints.wait()
        # srun may kill rank 0 while it is saving if another rank has exited.
        self._log.enter_phase(Phase.CHECKPOINT)
        dist.barrier(group=self._cpu_group)
