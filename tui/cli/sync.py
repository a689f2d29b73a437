"""`gputrain runs sync`: copy runs to Weights & Biases or MLflow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engine.base.errors import Problem
from engine.base.text import pluralize, printable
from engine.runs.folder import RunFolder
from tui.cli.command import command
from tui.cli.console import print_error, print_json, print_warning
from tui.cli.options import FollowOption, JsonOption
from tui.cli.run_options import takes_runs

if TYPE_CHECKING:
    from engine.report.sync.run_sync import RunSync

ServiceName = Literal["wandb", "mlflow"]
INTERRUPTED_EXIT_CODE = 130
POLL_SECONDS = 10.0


@command(
    [
        "gputrain runs sync last --service mlflow --follow",
        "WANDB_MODE=offline gputrain runs sync fashion-17 fashion-18 --service wandb",
    ],
    "Repeat the command to send what is new; after a kill, the last 500 steps may be sent again. Steps that a resume "
    "repeats remain as they were sent. A live run looks finished at W&B between two syncs. With WANDB_MODE=offline, "
    "each sync writes another folder with all steps, which `wandb sync` uploads as a run of its own.",
    "Server and credentials are those of the services: WANDB_API_KEY, WANDB_BASE_URL, WANDB_MODE, `wandb login`; "
    "MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN. W&B writes to WANDB_DIR [default: ~/.local/state/gputrain].",
    exit_codes={0: "everything was sent", 1: "the service cannot be used", 2: "usage error", 130: "interrupted"},
)
@takes_runs
def sync(
    *,
    folders: list[RunFolder],
    service: Annotated[
        ServiceName, typer.Option("--service", metavar="wandb|mlflow", help="Weights & Biases, or MLflow.")
    ],
    project: Annotated[
        str | None,
        typer.Option(
            "--project", "--experiment", metavar="NAME", help="W&B project or MLflow experiment [default: gputrain]"
        ),
    ] = None,
    follow: FollowOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy runs to Weights & Biases or MLflow.

    It reads the journals of the runs in a process of its own, so training never waits for a service. --follow also
    sends new steps.
    """
    from engine.report.sync.run_sync import SyncError

    syncs = [make_sync(service, folder, project) for folder in folders]
    try:
        send(syncs, follow=follow, as_json=as_json)
    except SyncError as error:
        print_error(Problem("", str(error), "repeat the command to continue", code=error.code))
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        if not follow:
            raise typer.Exit(INTERRUPTED_EXIT_CODE) from None
    for sync in syncs:
        sent = f"{pluralize(sync.steps_sent, 'step')} sent" if sync.steps_sent else "nothing new"
        typer.echo(f"{printable(sync.folder.name)}: {sync.run_state}, {sent}.", err=True)
    if as_json:
        rows = [
            {
                "run": sync.folder.name,
                "state": str(sync.run_state),
                "service": service,
                "location": sync.location,
                "steps": sync.sent_step,
                "sent": sync.steps_sent,
                "complete": sync.complete,
            }
            for sync in syncs
        ]
        print_json({"syncs": rows})


def send(syncs: Sequence[RunSync], *, follow: bool, as_json: bool) -> None:
    """Send what is new of each run, with `follow` until all have ended, and print where they are. Raises SyncError."""
    from engine.report.sync.run_sync import SyncError

    pending, locations = [*syncs], dict[str, str]()
    with ExitStack() as stack:
        for sync in syncs:
            stack.callback(sync.close)
        while pending:
            try:
                for sync in [*pending]:
                    if sync.poll() or not follow:
                        pending.remove(sync)
                    location, name = sync.location, printable(sync.folder.name)
                    if not as_json and location and locations.get(name) != location:
                        typer.echo(f"{name}  {printable(location)}")
                    locations[name] = location
            except SyncError as error:
                if not locations or not follow:
                    raise
                print_warning(Problem("", str(error), "trying again until Ctrl-C", code=error.code))
            if pending:
                time.sleep(POLL_SECONDS)


def make_sync(name: ServiceName, folder: RunFolder, project: str | None) -> RunSync:
    """Return the copy of a run at a service. Raises UsageError."""
    if name == "mlflow":
        from engine.report.sync.mlflow_store import MlflowSync

        return MlflowSync(folder, project)
    from engine.report.sync.wandb_service import WandbSync

    return WandbSync(folder, project)
