"""Checks of the form that depend on this host: GPUs, data and model. They may take long, so a thread runs them.

A helper process, `engine.launch.preflight_process`, computes the same problems as `gputrain run`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.config.schema import Config, as_dict
from engine.data.batching import build_sampler_from_counts
from engine.data.sampler import DistributedBatchSampler
from engine.gpus.snapshot import Snapshot
from engine.launch.preflight_process import scan_key
from engine.utils.errors import Problem, problems_from_json, problems_to_json
from engine.utils.helper_process import HelperError, HelperProcess, start_helper

# Building the model imports torch, so it waits until nothing is typed.
MODEL_CHECK_DELAY_SECONDS = 1.0


@dataclass(frozen=True)
class FormCheckResult:
    """The result for one config: its devices, its batches if the images could be counted, and its problems."""

    total_ranks: int = 1
    on_gpus: bool = False
    sampler: DistributedBatchSampler | None = None
    problems: list[Problem] = field(default_factory=list)


class FormChecker:
    """Checks one config after the other, each in its own thread; a newer check cancels the one before it."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._lock = threading.Lock()
        self._replaced = threading.Event()
        self._scan_key = ""
        self._preflight: HelperProcess | None = None
        """Kept as long as the data stays the same, which it scans once."""
        self._model: HelperProcess | None = None
        self._turn = threading.Lock()

    def check(
        self, config: Config, snapshot: Snapshot | None, problems: Sequence[Problem] = ()
    ) -> FormCheckResult | None:
        """Run the preflight of a config, the valid part of what was typed if it has `problems`.

        Blocks until the data is scanned. Return None if a newer check canceled this one."""
        replaced = self._replace(scan_key(config))
        with self._turn:
            if replaced.is_set():
                return None
            request = {
                "task": "preflight",
                "config": as_dict(config),
                "runs_dir": str(self._runs_dir),
                "problems": problems_to_json(problems),
                "snapshot": None if snapshot is None else snapshot.to_line(),
            }
            answer = self._ask("_preflight", request)
        if answer is None:
            return None
        sampler = None
        if answer["images"] is not None:
            train, val = answer["images"]
            sampler = build_sampler_from_counts(config, train, val, max(answer["devices"], 1))
        host_problems = problems_from_json(answer["problems"])
        return FormCheckResult(answer["devices"] or config.device.ranks, answer["on_gpu"], sampler, host_problems)

    def check_model(self, config: Config, *, on_gpu: bool) -> list[Problem]:
        """Build the model of a config that has no other problems, unless a newer check starts within a second."""
        if self._replaced.wait(MODEL_CHECK_DELAY_SECONDS):
            return []
        answer = self._ask("_model", {"task": "model", "config": as_dict(config), "on_gpu": on_gpu})
        return [] if answer is None else problems_from_json(answer.get("problems", ()))

    def cancel(self) -> None:
        self._replace("")

    def _replace(self, key: str) -> threading.Event:
        """Cancel the running checks, except the scan of the same data; return the event that the next check sets."""
        with self._lock:
            self._replaced.set()
            self._replaced = threading.Event()
            if key != self._scan_key and self._preflight is not None:
                self._preflight.kill()
                self._preflight = None
            if self._model is not None:
                self._model.kill()
                self._model = None
            self._scan_key = key
            return self._replaced

    def _ask(self, name: Literal["_preflight", "_model"], request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer of a helper process; None if it was canceled. Raises HelperError if it failed."""
        with self._lock:
            helper: HelperProcess | None = getattr(self, name)
            if helper is None:
                helper = start_helper("engine.launch.preflight_process", keep_stderr=False)
                setattr(self, name, helper)
        try:
            helper.send(request)
            answer: dict[str, Any] = helper.receive()
            return answer
        except HelperError:
            helper.close()
            if getattr(self, name) is not helper:
                return None
            setattr(self, name, None)
            raise
