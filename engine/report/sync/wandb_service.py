"""Send runs to Weights & Biases, or write offline runs for `wandb sync`, through its client library.

The history of a W&B run only grows. The global step of training is its step, so a resumed run tells which steps the
server has. An offline run cannot be resumed (https://github.com/wandb/wandb/issues/4624), so each sync writes another
offline folder with all steps and another ID.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.base.errors import UsageError, not_installed
from engine.base.files import make_user_folder, state_folder
from engine.report.sync.rows import Row
from engine.report.sync.run_sync import RunSync, without_credentials
from engine.runs.folder import RunFolder, RunState
from engine.runs.labels import RunLabels

DEFAULT_PROJECT = "gputrain"
# W&B shows a run with this exit code as killed, as after Ctrl-C.
STOPPED_EXIT_CODE = 255
EXIT_CODES: dict[str, int] = {RunState.FINISHED: 0, RunState.STOPPED: STOPPED_EXIT_CODE}
LIBRARY_VARIABLES = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", "WANDB_INIT_TIMEOUT": "30"}
# Nothing about this machine and process: the run may come from another one.
SETTINGS: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "finish_timeout": 300.0,
    "finish_timeout_raises": True,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
}


class WandbSync(RunSync):
    """Copies a run to a project at a W&B server, or to a folder of offline runs."""

    advice = "run `wandb login`, check WANDB_BASE_URL and WANDB_API_KEY, or write a folder with WANDB_MODE=offline"

    def __init__(self, folder: RunFolder, project: str | None) -> None:
        """Take server, credentials, mode and entity from W&B's own variables and settings. Raises UsageError."""
        for name, value in LIBRARY_VARIABLES.items():
            os.environ.setdefault(name, value)
        # A notebook that has used W&B names its own service to its children, which would keep the run of a killed sync.
        os.environ.pop("WANDB_SERVICE", None)
        if not os.environ.get("WANDB_DIR"):
            os.environ["WANDB_DIR"] = str(make_user_folder(state_folder()))
        try:
            import wandb
        except ImportError as error:
            raise UsageError.one("--service wandb", not_installed("wandb"), code="not-installed") from error
        self._library, settings = wandb, wandb.setup().settings
        if settings.mode == "disabled":
            reason = "is disabled, so nothing would be sent; use online or offline"
            raise UsageError.one("WANDB_MODE", reason, code="switched-off")
        self._is_offline = settings.mode == "offline"
        self._project = project or settings.project or DEFAULT_PROJECT
        place = "offline" if self._is_offline else without_credentials(settings.base_url)
        super().__init__(folder, f"{place} {settings.entity or ''}/{self._project}")

    def open(self, token: str, config: Mapping[str, Any], labels: RunLabels, started_at: float | None) -> None:
        self._run, self._started_at = self._init(secrets.token_hex(8) if self._is_offline else token), started_at
        self._run.config.update(config, allow_val_change=True)
        self._run.tags, self._run.notes = labels.tags, labels.note
        self.location = str(Path(self._run.dir).parent) if self._is_offline else str(self._run.url)
        # The server knows what has arrived.
        self.sent_step = max(self._run.starting_step - 1, 0) if self._run.resumed else 0

    def _init(self, run_id: str) -> Any:
        """Start a W&B run. A prompt for credentials is an error, because nobody may be there to answer it."""
        known = self._library.Settings.model_fields
        settings = {key: value for key, value in SETTINGS.items() if key in known}
        # The library installs a hook that outlives the run, and asks for an API key only on a terminal.
        excepthook, stdin = sys.excepthook, sys.stdin
        try:
            with Path(os.devnull).open() as sys.stdin:
                return self._library.init(
                    project=self._project,
                    id=run_id,
                    name=self.folder.name,
                    resume=None if self._is_offline else "allow",
                    reinit="create_new",
                    settings=self._library.Settings(**settings),
                    force=not self._is_offline,
                )
        finally:
            sys.excepthook, sys.stdin = excepthook, stdin

    def send(self, rows: list[Row]) -> None:
        for row in rows:
            values = {**row.metrics, "_timestamp": row.time}
            if self._started_at is not None:
                # W&B's own relative time counts from the start of the sync.
                values["train/seconds"] = max(row.time - self._started_at, 0.0)
            self._run.log(values, step=row.step)

    def finish(self, figures: Row, message: str) -> None:
        values = {name.removeprefix("summary/"): value for name, value in figures.metrics.items()}
        self._run.summary.update(values | {"state": str(self.run_state), "message": message})
        self._run.finish(exit_code=EXIT_CODES.get(self.run_state, 1))

    def leave(self) -> None:
        """End the W&B run. It looks finished until the next sync; its summary says that the run goes on."""
        self._run.summary.update({"state": "running"})
        self._run.finish(exit_code=0)
