"""Checks of the form that depend on this host: GPUs and data. They may take long, so a thread runs them.

A helper process, `engine.jobs.launch.preflight_process`, computes the same problems as `gputrain run`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.base.errors import Problem
from engine.base.helper_process import HelperError, HelperProcess, start_helper
from engine.config.schema import Config, as_dict, without_default_batch_size
from engine.gpus.snapshot import Snapshot
from engine.jobs.launch.preflight_process import PreflightRequest, PreflightResult, scan_key
from engine.train.data.checks import build_sampler_from_counts
from engine.train.data.sampler import DistributedBatchSampler

CANCEL_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class FormCheckResult:
    """The result for one config: that of the preflight, its batches if the images could be counted, and the name that
    the run gets if none is typed."""

    preflight: PreflightResult
    total_ranks: int = 1
    sampler: DistributedBatchSampler | None = None
    run_name: str = ""

    @property
    def problems(self) -> list[Problem]:
        """What prevents the start."""
        return self.preflight.problems


class FormChecker:
    """Checks one config after the other, each in its own thread; a newer check cancels the one before it."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._lock = threading.Lock()
        """Guards the fields below. It is held only briefly, because the UI thread takes it."""
        self._canceled = threading.Event()
        self._scan_key = ""
        self._helper: HelperProcess | None = None
        """Kept as long as the data stays the same, which it scans once."""
        self._turn = threading.Lock()
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
        result = self._ask(canceled, request)
        if result is None:
            return None
        total_ranks, sampler = result.devices or config.device.ranks, None
        if (images := result.images) is not None:
            checked = (
                config if result.batch_size is None else config.with_values(data={"batch_size": result.batch_size})
            )
            sampler = build_sampler_from_counts(checked, images.train, images.val, total_ranks)
        return FormCheckResult(result, total_ranks, sampler)

    def cancel(self) -> None:
        self._replace("")

    def _replace(self, key: str) -> threading.Event:
        """Cancel the running checks, except the scan of the same data; return the event of the next check."""
        with self._lock:
            self._canceled.set()
            self._canceled = threading.Event()
            if key != self._scan_key and self._helper is not None:
                self._helper.kill()
                self._helper = None
            self._scan_key = key
            return self._canceled

    def _ask(self, canceled: threading.Event, request: PreflightRequest) -> PreflightResult | None:
        """Return the answer of the helper process; None if the check was canceled. Raises HelperError if it failed."""
        while not self._turn.acquire(timeout=CANCEL_POLL_SECONDS):
            if canceled.is_set():
                return None
        try:
            with self._lock:
                if canceled.is_set():
                    return None
                if self._helper is None:
                    self._helper = start_helper("engine.jobs.launch.preflight_process", keep_stderr=False)
                helper = self._helper
            try:
                helper.send(request)
                return helper.receive(PreflightResult)
            except HelperError:
                helper.close()
                with self._lock:
                    if self._helper is not helper:
                        return None
                    self._helper = None
                raise
        finally:
            self._turn.release()
