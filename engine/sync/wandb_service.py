"""Send runs to Weights & Biases, or write offline runs for `wandb sync`, through its client library.

The history of a W&B run only grows; rewinding it is a preview that few servers have. The global step of training is its
step, so a resumed run tells which steps the server has. A run with void steps is tagged, and gets a successor with
another ID. An offline run cannot be resumed (https://github.com/wandb/wandb/issues/4624), so each sync replaces the
offline folder by one with all steps. If the folder was uploaded, the new one has another ID: a second upload under the
same ID replaces the first or repeats its steps, depending on the versions of client and server.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from engine.runs.folder import RunState
from engine.sync.description import RunDescription
from engine.sync.remote import RemoteRun, Service, SyncError, first_line, without_credentials
from engine.sync.rows import Row
from engine.sync.state import RemoteState
from engine.utils.errors import UsageError, not_installed
from engine.utils.files import make_user_folder, state_folder

DEFAULT_PROJECT = "gputrain"
VOID_TAG = "void"
# `wandb sync` leaves an empty file with this suffix beside a file that it has uploaded.
UPLOADED_SUFFIX = ".wandb.synced"
# W&B shows a run with this exit code as killed, as after Ctrl-C.
STOPPED_EXIT_CODE = 255
EXIT_CODES = {RunState.FINISHED: 0, RunState.STOPPED: STOPPED_EXIT_CODE}
LIBRARY_VARIABLES = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", "WANDB_INIT_TIMEOUT": "30"}
# Nothing about this machine and process: the run may come from another one.
SETTINGS: dict[str, Any] = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "finish_timeout": 300.0,
    "finish_timeout_raises": True,
    "save_code": False,
    "silent": True,
    "symlink": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
}


class WandbService(Service):
    """A project at a W&B server, or a folder of offline runs."""

    name = "wandb"

    def __init__(self, project: str | None) -> None:
        """Take server, credentials, mode and entity from W&B's own variables and settings. Raises UsageError."""
        for name, value in LIBRARY_VARIABLES.items():
            os.environ.setdefault(name, value)
        # A notebook that has used W&B names its own service to its children, which would keep the run of a killed sync.
        os.environ.pop("WANDB_SERVICE", None)
        if not os.environ.get("WANDB_DIR"):
            try:
                os.environ["WANDB_DIR"] = str(make_user_folder(state_folder()))
            except OSError as error:
                raise UsageError.one(
                    str(error.filename), str(error.strerror), "set WANDB_DIR to a folder", code="not-writable"
                ) from error
        try:
            import wandb
        except ImportError as error:
            raise UsageError.one("--service wandb", not_installed("wandb"), code="not-installed") from error
        self._library = wandb
        self._settings = wandb.setup().settings
        if self._settings.mode == "disabled":
            raise UsageError.one(
                "WANDB_MODE", "is disabled, so nothing would be sent; use online or offline", code="switched-off"
            )
        self._is_offline = self._settings.mode in ("offline", "dryrun")
        self._address = without_credentials(self._settings.base_url)
        self._project = project or self._settings.project or DEFAULT_PROJECT
        self._folder = Path(self._settings.wandb_dir)
        place = "offline" if self._is_offline else self._address
        self.destination = f"{place} {self._settings.entity or ''}/{self._project}"

    def open(self, state: RemoteState, description: RunDescription, save: Callable[[], None]) -> RemoteRun:
        if self._is_offline:
            is_uploaded = self._delete_offline_folders(state)
            state.restart(secrets.token_hex(8) if is_uploaded else None)
            save()
        elif state.void:
            self._mark_void(state, description)
            state.restart(secrets.token_hex(8))
            save()
        run = self._init(state, description, resume=None if self._is_offline else "allow")
        held_step = max(run.starting_step - 1, 0) if run.resumed else 0
        remote = WandbRun(run, held_step, description.started_at)
        remote.location = str(Path(run.dir).parent) if self._is_offline else str(run.url)
        remote.describe(description)
        return remote

    def _init(self, state: RemoteState, description: RunDescription, resume: Literal["allow"] | None) -> Any:
        """Start a W&B run. A prompt for credentials is an error, because nobody may be there to answer it."""
        known = self._library.Settings.model_fields
        settings = {name: value for name, value in SETTINGS.items() if name in known}
        if description.host:
            settings["host"] = description.host
        # The library installs a hook that outlives the run, and asks for an API key only on a terminal.
        excepthook, stdin = sys.excepthook, sys.stdin
        try:
            with Path(os.devnull).open() as sys.stdin:
                return self._library.init(
                    project=self._project,
                    id=state.token,
                    name=description.name,
                    resume=resume,
                    reinit="create_new",
                    settings=self._library.Settings(**settings),
                    force=not self._is_offline,
                )
        finally:
            sys.excepthook, sys.stdin = excepthook, stdin

    def _mark_void(self, state: RemoteState, description: RunDescription) -> None:
        """Tag a run with void steps at the server, where a deletion could not be undone."""
        # Somebody may have deleted it, which the library reports like a lost connection. The next request tells which.
        with suppress(Exception):
            run = self._init(state, description, resume="allow")
            run.tags = (*description.tags, VOID_TAG)
            run.finish(exit_code=1)

    def _delete_offline_folders(self, state: RemoteState) -> bool:
        """Delete the offline folders that earlier syncs of a run have written, also those of a killed sync.

        Returns whether one of them was uploaded; such a folder remains.
        """
        is_uploaded = False
        for folder in self._folder.glob(f"offline-run-*-{state.token}*"):
            if any(folder.glob(f"*{UPLOADED_SUFFIX}")):
                is_uploaded = True
            elif folder.is_dir() and not folder.is_symlink():
                with suppress(OSError):
                    shutil.rmtree(folder)
        return is_uploaded

    def to_sync_error(self, error: Exception) -> SyncError:
        errors = self._library.errors
        if isinstance(error, errors.AuthenticationError):
            message = f"W&B at {self._address} refuses the API key: {first_line(error)}"
            return SyncError(f"{message}; run `wandb login`, or set WANDB_API_KEY", code="access-denied")
        message = f"W&B at {self._address} cannot be used: {first_line(error)}"
        if isinstance(error, errors.CommError):
            advice = "check WANDB_BASE_URL and WANDB_API_KEY, or write a folder with WANDB_MODE=offline"
            return SyncError(f"{message}; {advice}", temporary=True, code="connection-failed")
        return SyncError(message, code="service-failed")

    def close(self) -> None:
        # Ends the process of the library. It would also end when this process does.
        with suppress(Exception):
            self._library.teardown()


class WandbRun(RemoteRun):
    """A run of a project."""

    def __init__(self, run: Any, held_step: int, started_at: float | None) -> None:
        self.held_step = held_step
        self._run = run
        self._started_at = started_at

    def describe(self, description: RunDescription) -> None:
        self._run.config.update(description.config, allow_val_change=True)
        if self._run.name != description.name:
            self._run.name = description.name
        if description.tags or self._run.tags:
            self._run.tags = description.tags
        if description.note or self._run.notes:
            self._run.notes = description.note

    def send(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = {**row.metrics, "_timestamp": row.time}
            if self._started_at is not None:
                # W&B's own relative time counts from the start of the sync.
                values["train/seconds"] = max(row.time - self._started_at, 0.0)
            self._run.log(values, step=row.step)

    def finish(self, state: RunState, figures: Row, message: str) -> None:
        values = {name.removeprefix("summary/"): value for name, value in figures.metrics.items()}
        self._run.summary.update(values | {"state": state.value, "message": message})
        self._run.finish(exit_code=EXIT_CODES.get(state, 1))

    def leave(self) -> None:
        """End the W&B run. It looks finished until the next sync; its summary says that the run goes on."""
        self._run.summary.update({"state": "running"})
        self._run.finish(exit_code=0)
