"""A learning rate range test of the form: `gputrain lr-find` as a child process, and what it has reported so far.

`tui.widgets.lr_test` shows it.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.config.schema import Config, as_dict
from engine.optim.lr_range import LossCurve, LrRange, LrSuggestion
from engine.utils.helper_process import HelperExitedError, HelperProcess
from engine.utils.text import printable
from tui.launcher import CHILD_PROGRAM

TESTED_SECTIONS = ("device", "data", "augment", "model", "loss", "optim", "precision")
TESTED_KEYS_OF_RUN = ("seed", "code")
UNTESTED_KEYS = {"optim.lr", "model.ema"}


@dataclass(frozen=True)
class LrTestResult:
    """What a test has reported. `status` is what it does or why it ended; `error` is set if it failed."""

    curve: LossCurve
    suggestion: LrSuggestion | None = None
    status: str = "starting"
    error: str = ""


class LrTest:
    """One test. `follow` blocks until its end; any thread may use the other members."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Take the arguments of `gputrain run` behind the name of the command."""
        self._arguments = arguments
        self._lock = threading.Lock()
        """Guards the fields below. It is held only briefly, because the UI thread takes it."""
        self._result = LrTestResult(LossCurve(LrRange()))
        self._process: HelperProcess | None = None
        self._canceled = False

    @property
    def result(self) -> LrTestResult:
        """What the test has reported so far, as a copy."""
        with self._lock:
            curve = self._result.curve
            copy = replace(curve, losses=list(curve.losses), smoothed=list(curve.smoothed))
            return replace(self._result, curve=copy)

    def follow(self) -> None:
        """Start the process, and read what it reports until it ends or is canceled."""
        with self._lock:
            if self._canceled:
                return
            # Linux kills the child when this thread ends, which is when the test ends.
            process = self._process = HelperProcess(
                CHILD_PROGRAM, "lr-find", *self._arguments, "--json", str(os.getpid())
            )
        try:
            while True:
                line = process.receive(dict[str, Any])
                with self._lock:
                    self._consume(line)
        except HelperExitedError as error:
            with self._lock:
                if self._result.suggestion is None and not self._canceled:
                    reason = self._result.error or printable(error.last_line.removeprefix("error: ") or str(error))
                    self._result = replace(self._result, status="failed", error=reason)
        finally:
            process.close()

    def cancel(self) -> None:
        """Kill the process and its ranks. Returns at once."""
        with self._lock:
            self._canceled = True
            self._result = replace(self._result, status="stopped")
            if self._process is not None:
                self._process.kill()

    def _consume(self, line: dict[str, Any]) -> None:
        curve, kind, status = self._result.curve, line.get("type"), None
        if kind == "lr_step":
            loss = line.get("loss")
            curve.add(loss if isinstance(loss, float) else math.inf)
            status = f"step {len(curve.losses)}/{curve.lr_range.steps}"
        elif kind == "waiting":
            status = f"waiting: {printable(str(line.get('message')))}"
        elif kind == "run_finished":
            self._result = replace(self._result, error=printable(str(line.get("message"))))
        elif kind == "lr_found":
            rates = line.get("valley"), line.get("steepest")
            found = LrSuggestion(*map(float, rates)) if None not in rates else None  # type: ignore[arg-type]
            status = "diverged" if curve.diverged else "done"
            self._result = replace(self._result, suggestion=found)
        if status is not None and not self._canceled:
            self._result = replace(self._result, status=status)


def tested_values(config: Config) -> object:
    """Return the values of a config on which the result of a test depends."""
    values = as_dict(config)
    tested = {f"{section}.{name}": value for section in TESTED_SECTIONS for name, value in values[section].items()}
    tested |= {f"run.{name}": values["run"][name] for name in TESTED_KEYS_OF_RUN}
    return {key: value for key, value in tested.items() if key not in UNTESTED_KEYS}
