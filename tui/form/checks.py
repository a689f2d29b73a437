"""Checks of the form that depend on this host: GPUs, data and model. They may take long, so a thread runs them.

A helper process, `engine.launch.preflight_process`, computes the same problems as `gputrain run`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from engine.config.schema import Config, as_dict, without_default_batch_size
from engine.data.batching import build_sampler_from_counts
from engine.data.sampler import DistributedBatchSampler
from engine.gpus.snapshot import Snapshot
from engine.launch.preflight_process import ModelCheck, ModelRequest, PreflightRequest, PreflightResult, scan_key
from engine.utils.codec import Record
from engine.utils.errors import Problem
from engine.utils.helper_process import HelperError, HelperProcess, start_helper

# Building the model imports torch, so it waits until nothing is typed.
MODEL_CHECK_DELAY_SECONDS = 1.0
CANCEL_POLL_SECONDS = 0.1
NOT_BUILT = ModelCheck()

Task = Literal["preflight", "model"]
ResultT = TypeVar("ResultT", bound=Record)


@dataclass(frozen=True)
class FormCheckResult:
    """The result for one config: that of the preflight, its batches if the images could be counted, the model once it
    is built, and the name that the run gets if none is typed."""

    preflight: PreflightResult
    total_ranks: int = 1
    sampler: DistributedBatchSampler | None = None
    model: ModelCheck = NOT_BUILT
    run_name: str = ""

    @property
    def problems(self) -> list[Problem]:
        """What prevents the start."""
        return [*self.preflight.problems, *self.model.problems]


class FormChecker:
    """Checks one config after the other, each in its own thread; a newer check cancels the one before it."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._lock = threading.Lock()
        """Guards the fields below. It is held only briefly, because the UI thread takes it."""
        self._canceled = threading.Event()
        self._scan_key = ""
        self._helpers: dict[Task, HelperProcess] = {}
        """That of the preflight is kept as long as the data stays the same, which it scans once."""
        self._turns: dict[Task, threading.Lock] = {"preflight": threading.Lock(), "model": threading.Lock()}
        """Held from a request to its answer."""

    def begin(self, config: Config) -> threading.Event:
        """Cancel the running checks, and return the event that is set when the check of this config is canceled.

        The UI thread calls it before it starts the thread of the check, which has to wait if all threads are busy."""
        return self._replace(scan_key(config))

    def check(
        self,
        canceled: threading.Event,
        config: Config,
        snapshot: Snapshot | None,
        problems: Sequence[Problem] = (),
        *,
        typed: Iterable[str] = (),
        warnings: Sequence[Problem] = (),
    ) -> FormCheckResult | None:
        """Run the preflight of a config, the valid part of what was typed if it has `problems`.

        `typed` are the keys that the user typed; `warnings` those of the config, which the result repeats.
        Blocks until the data is scanned. Return None if a newer check canceled this one."""
        request = PreflightRequest(
            config=without_default_batch_size(config, as_dict(config)),
            runs_dir=str(self._runs_dir),
            problems=list(problems),
            typed=list(typed),
            warnings=list(warnings),
            snapshot=snapshot,
        )
        result = self._ask("preflight", canceled, request, PreflightResult)
        if result is None:
            return None
        total_ranks, sampler = result.devices or config.device.ranks, None
        if (images := result.images) is not None:
            checked = (
                config if result.batch_size is None else config.with_values(data={"batch_size": result.batch_size})
            )
            sampler = build_sampler_from_counts(checked, images.train, images.val, total_ranks)
        return FormCheckResult(result, total_ranks, sampler)

    def check_model(
        self, canceled: threading.Event, config: Config, *, on_gpu: bool, check_gpus: bool = False
    ) -> ModelCheck:
        """Build the model of a config that has no other problems, unless a newer check begins within a second.

        `check_gpus` also checks whether torch can use the GPUs of this host."""
        if canceled.wait(MODEL_CHECK_DELAY_SECONDS):
            return ModelCheck()
        request = ModelRequest(
            config=as_dict(config), runs_dir=str(self._runs_dir), on_gpu=on_gpu, check_gpus=check_gpus
        )
        return self._ask("model", canceled, request, ModelCheck) or ModelCheck()

    def cancel(self) -> None:
        self._replace("")

    def _replace(self, key: str) -> threading.Event:
        """Cancel the running checks, except the scan of the same data; return the event of the next check."""
        with self._lock:
            self._canceled.set()
            self._canceled = threading.Event()
            tasks: tuple[Task, ...] = ("model",) if key == self._scan_key else ("model", "preflight")
            for task in tasks:
                if (helper := self._helpers.pop(task, None)) is not None:
                    helper.kill()
            self._scan_key = key
            return self._canceled

    def _ask(self, task: Task, canceled: threading.Event, request: Record, kind: type[ResultT]) -> ResultT | None:
        """Return the answer of a helper process; None if the check was canceled. Raises HelperError if it failed."""
        turn = self._turns[task]
        while not turn.acquire(timeout=CANCEL_POLL_SECONDS):
            if canceled.is_set():
                return None
        try:
            with self._lock:
                if canceled.is_set():
                    return None
                if task not in self._helpers:
                    self._helpers[task] = start_helper("engine.launch.preflight_process", keep_stderr=False)
                helper = self._helpers[task]
            try:
                helper.send(request)
                return helper.receive(kind)
            except HelperError:
                helper.close()
                with self._lock:
                    if self._helpers.get(task) is not helper:
                        return None
                    del self._helpers[task]
                raise
        finally:
            turn.release()
