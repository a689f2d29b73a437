"""`gputrain runs sync`: copy runs to Weights & Biases or MLflow."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from engine.utils.errors import Problem
from engine.utils.text import pluralize, printable
from tui.cli.command import command
from tui.cli.console import print_error, print_warning
from tui.cli.options import FollowOption, JsonOption
from tui.cli.run_options import takes_runs

if TYPE_CHECKING:
    from engine.runs.folder import RunFolder
    from engine.sync.remote import Service, SyncError
    from engine.sync.run_sync import RunSync

ServiceName = Literal["wandb", "mlflow"]
INTERRUPTED_EXIT_CODE = 130


@command(
    [
        "gputrain runs sync last --service mlflow --follow",
        "WANDB_MODE=offline gputrain runs sync fashion-17 fashion-18 --service wandb",
    ],
    "Repeat the command to send what is new. Each step is sent once, also after a resume or a kill. If a resume "
    "repeats steps that were sent, another remote run gets all steps. The old one has the tag `void` at W&B, and "
    "is deleted at MLflow (`mlflow runs restore` undoes it). A live run whose sync was interrupted looks finished "
    "at W&B until the next sync. With WANDB_MODE=offline, each sync writes a folder with all steps for "
    "`wandb sync`; after an upload, the next folder has another ID.",
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
    from engine.sync.remote import SyncError
    from engine.sync.run_sync import RunSync, sync_runs
    from engine.sync.state import open_state

    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_signal())
        states = [stack.enter_context(open_state(folder, service)) for folder in folders]
        remote = open_service(service, project)
        stack.callback(remote.close)
        syncs = [RunSync(folder, remote, state, stop) for folder, state in zip(folders, states, strict=True)]
        progress = Progress(as_json=as_json)
        try:
            sync_runs(
                syncs,
                follow=follow,
                stop=stop,
                on_progress=progress.report,
                on_interruption=progress.report_lost_service,
            )
        except SyncError as error:
            fail(error)
        progress.report_unfinished(syncs)
        if as_json:
            from tui.cli.outputs import SyncOutput, print_json

            print_json(SyncOutput(syncs=[to_json(sync, service) for sync in syncs]))
        if stop() and not follow:
            raise typer.Exit(INTERRUPTED_EXIT_CODE)


def open_service(name: ServiceName, project: str | None) -> Service:
    """Return the service of `--service`. Raises UsageError."""
    if name == "mlflow":
        from engine.sync.mlflow_store import MlflowStore

        return MlflowStore(project)
    from engine.sync.wandb_service import WandbService

    return WandbService(project)


def fail(error: SyncError) -> None:
    """Print what is wrong with the service and exit with code 1."""

    print_error(Problem("", str(error), code=error.code))
    if error.temporary:
        typer.echo("Repeat the command later: it continues where it was.", err=True)
    raise typer.Exit(1) from error


def to_json(sync: RunSync, service: str) -> dict[str, Any]:
    return {
        "run": sync.folder.name,
        "state": sync.run_state.value,
        "service": service,
        "location": sync.state.location,
        "steps": sync.state.sent_step,
        "sent": sync.steps_sent,
        "complete": bool(sync.state.ended),
    }


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGINT or SIGTERM was received. A second SIGINT interrupts at once."""
    received: list[int] = []

    def handle(number: int, _: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Progress:
    """Prints the remote runs on stdout, and what happens on stderr."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._locations: dict[str, str] = {}
        self._problems: set[str] = set()
        self._complete: set[str] = set()

    def report(self, sync: RunSync, complete: bool) -> None:
        """Print where a run is when that is known or changes, its problems, and its end."""

        name = printable(sync.folder.name)
        if sync.state.location and self._locations.get(name) != sync.state.location:
            if name in self._locations:
                typer.echo(f"{name}: a resume repeats steps that were sent, so its remote run was replaced.", err=True)
            self._locations[name] = sync.state.location
            if not self._as_json:
                typer.echo(f"{name}  {printable(sync.state.location)}")
        if sync.problem is not None and sync.problem not in self._problems:
            self._problems.add(sync.problem)
            typer.echo(f"warning: {name}: {printable(sync.problem)}", err=True)
        if complete:
            self._complete.add(name)
            typer.echo(f"{name}: {sync.run_state}, {_sent(sync)}.", err=True)

    def report_unfinished(self, syncs: Sequence[RunSync]) -> None:
        """Print which runs have more to send than was sent."""

        for sync in syncs:
            name = printable(sync.folder.name)
            if name not in self._complete:
                typer.echo(f"{name}: {sync.run_state}, {_sent(sync)}; repeat the command to send the rest.", err=True)

    def report_lost_service(self, error: SyncError) -> None:
        """Print once why nothing can be sent for now."""

        if str(error) not in self._problems:
            self._problems.add(str(error))
            print_warning(Problem("", str(error), "trying again until Ctrl-C", code=error.code))


def _sent(sync: RunSync) -> str:

    return f"{pluralize(sync.steps_sent, 'step')} sent" if sync.steps_sent else "nothing new"
