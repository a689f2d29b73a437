"""`gputrain lr-find`: find a learning rate with a range test on the ranks of a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.base.codec import finite
from engine.base.errors import Problem
from engine.base.text import pluralize, printable
from engine.base.units import format_lr, format_score
from engine.runs.event_lines import describe_devices, event_line
from engine.runs.events import ControlEvent, Event, RunStarted
from engine.train.optim.lr_range import MAX_STEPS, MIN_STEPS, LossCurve, LrRange
from tui.cli.command import command
from tui.cli.config_arguments import (
    ConfigArguments,
    FlagOverrides,
    config_flags,
    resolve_arguments,
    split_arguments,
)
from tui.cli.console import json_line, print_error, show_progress
from tui.cli.options import TrustCodeOption
from tui.cli.train import StartOptions, build_request

LR_KEY = "optim.lr"


@command(
    [
        "gputrain lr-find digits",
        "gputrain lr-find flowers.yaml --gpus 0,1 --amp bf16 --set",
        "gputrain lr-find flowers.yaml --from 1e-5 --to 1 --steps 200",
    ],
    exit_codes={0: "a learning rate was found", 1: "failed, stopped, or nothing to suggest", 2: "usage error"},
)
@config_flags()
def lr_find(
    *,
    arguments: ConfigArguments = None,
    low: Annotated[float, typer.Option("--from", metavar="LR", help="First learning rate.")] = 1e-6,
    high: Annotated[float, typer.Option("--to", metavar="LR", help="Last learning rate.")] = 10.0,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", metavar="N", min=MIN_STEPS, max=MAX_STEPS, help="Learning rates to test, one per step."
        ),
    ] = 100,
    write: Annotated[bool, typer.Option("--set", help="Write the suggestion to optim.lr in the CONFIG file.")] = False,
    flags: FlagOverrides,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: events, losses, result.")] = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Find a learning rate with a short test.

    Trains a throw-away model as a run would, while the learning rate grows, until the loss diverges.

    Learning rate, schedule, epochs and EMA of the config have no effect on it, and it leaves no files.
    """
    from engine.config.yaml_edit import editable_config, set_number
    from engine.jobs.launch.training import UNUSED_KEYS, run_lr_find

    file, _ = split_arguments(arguments)
    # Before the test, which takes a while.
    path = editable_config(file) if write else None
    request = build_request(
        lambda: resolve_arguments(arguments, flags, trust_code=trust_code, unused=UNUSED_KEYS),
        StartOptions(trust_code=trust_code),
        stem="lr-find",
    )
    tested = LrRange(low, high, steps)
    report = Report(tested, as_json=as_json)
    try:
        code, curve = run_lr_find(request, tested, report.show_step, report.show_event)
    finally:
        show_progress("")
    # Under torchrun and srun, only rank 0 has losses.
    if code == 0 and curve.losses:
        suggestion = curve.suggest()
        report.show_result(curve, suggestion)
        code = 0 if suggestion is not None else 1
        if path is not None and suggestion is not None:
            set_number(path, LR_KEY, suggestion)
            report.show_change(path)
    sys.stdout.flush()
    # A regular exit takes a second with torch loaded.
    os._exit(code)


class Report:
    """Prints a test: progress and messages to stderr, the suggestion to stdout.

    With `as_json`, all of it is JSON lines on stdout: the events of the ranks, `lr_step`, `lr_found`, `lr_written`."""

    def __init__(self, tested: LrRange, *, as_json: bool) -> None:
        self._tested, self._as_json = tested, as_json

    def show_event(self, event: Event) -> None:
        if self._as_json:
            print(json_line(event), flush=True)
        elif (line := range_test_line(event, self._tested)) is not None:
            show_progress("")
            typer.echo(line, err=True)

    def show_step(self, curve: LossCurve) -> None:
        step, lr, smoothed = len(curve.losses), curve.learning_rates[-1], curve.smoothed[-1]
        if self._as_json:
            self._print("lr_step", step=step, lr=lr, loss=finite(curve.losses[-1]), smoothed=finite(smoothed))
        else:
            show_progress(f"step {step}/{self._tested.steps}  lr {format_lr(lr)}  loss {format_score(smoothed)}")

    def show_result(self, curve: LossCurve, suggestion: float | None) -> None:
        if self._as_json:
            self._print("lr_found", valley=suggestion, diverged=curve.diverged, steps=len(curve.losses))
        elif suggestion is None:
            print_error(no_suggestion_problem(curve))
        else:
            typer.echo(describe_end(curve))
            typer.echo(f"{LR_KEY}={format_lr(suggestion)}  two thirds into the range in which the loss falls")

    def show_change(self, path: Path) -> None:
        if self._as_json:
            self._print("lr_written", path=str(path))
        else:
            typer.echo(printable(f"{path}: set"))

    @staticmethod
    def _print(kind: str, **values: Any) -> None:
        print(json_line({"type": kind, **values}), flush=True)


def describe_end(curve: LossCurve) -> str:
    """Return why the test ended where it did."""
    last = format_lr(curve.learning_rates[-1])
    if curve.diverged:
        return f"the loss diverged at {last}, after {len(curve.losses)} of {curve.lr_range.steps} steps"
    return f"the loss did not diverge up to {last}"


def describe_range_test(started: RunStarted, tested: LrRange) -> str:
    """Return what is tested: devices, batch size and learning rates."""
    return (
        f"{describe_devices(started)}, global batch size {started.global_batch}, up to "
        f"{pluralize(tested.steps, 'step')} with optim.lr from {format_lr(tested.low)} to {format_lr(tested.high)}"
    )


def range_test_line(event: Event, tested: LrRange) -> str | None:
    """Return the line of an event for the terminal; None if it has none."""
    if isinstance(event, RunStarted):
        return describe_range_test(event, tested)
    if isinstance(event, ControlEvent):
        return f"stopped by {printable(event.by)} before the end of the test: no suggestion"
    return event_line(event)


def no_suggestion_problem(curve: LossCurve) -> Problem:
    """Return why a curve suggests nothing, and what to do."""
    tested = curve.lr_range
    advice = "lower --from" if curve.diverged else "raise --to, or check model and data with a short run"
    low, last = format_lr(tested.low), format_lr(curve.learning_rates[-1])
    reason = f"no suggestion: the loss does not fall between {low} and {last}"
    return Problem("", reason, advice, code="no-suggestion")
