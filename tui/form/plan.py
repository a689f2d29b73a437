"""What the form says about a run before it starts: title, problems, warnings, plan, and facts beside the fields."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from engine.base.errors import Problem
from engine.base.text import pluralize, printable
from engine.base.units import format_number
from engine.config.schema import Config
from engine.config.tasks import task_facts
from engine.gpus.current_use import find_current_use
from engine.gpus.snapshot import Snapshot
from engine.train.optim.lr_schedule import scaled_lr
from tui.form.checks import FormCheckResult
from tui.form.model import Form
from tui.terminal.palette import BAD, MUTED, WARNING


def form_title(form: Form, run_config: Path | None, *, is_draft: bool = False) -> str:
    """Return the title of the form: its base or the run whose config it repeats, and the number of changes. `is_draft`
    says that they are those of the last form."""
    changes = len(form.overrides.keys() - {"run.name"})
    words = [pluralize(changes, "change")] if changes else []
    if run_config is not None:
        return printable(f"again: {run_config.parent.name}   {', '.join(words)}")
    what = "last form: " if is_draft else ""
    return printable(f"new run   {what}{', '.join([_describe_base(form.base), *words])}")


def check_title(problems: int, *, is_checked: bool) -> str:
    """Return whether the run can start, for the title of the plan."""
    if problems:
        return f"✗ {pluralize(problems, 'error')} to fix"
    return "✓ ready to start" if is_checked else "checking …"


def _describe_base(base: str | None) -> str:
    if base is None:
        return "no preset"
    if base.endswith("/config.yaml"):
        # The config of a run, whose folder is its name.
        base = Path(base).parent.name
    return f"file {Path(base).name}" if "/" in base else f"preset {base}"


def gpu_use(snapshot: Snapshot | None) -> object:
    """Return what the plan depends on: which GPUs answer, and who computes on them. None before the first snapshot."""
    if snapshot is None:
        return None
    uses = ((gpu, find_current_use(gpu)) for gpu in snapshot.gpus)
    return snapshot.pending, [
        (gpu.uuid, gpu.state, use and use.obstacle, [process.pid for process in gpu.processes.value or ()])
        for gpu, use in uses
    ]


def plan_text(
    config: Config | None, problems: Sequence[Problem], result: FormCheckResult | None, other_host: str = ""
) -> Text:
    """Return the problems, the warnings and the plan of a run, one per line, the most urgent first."""
    lines = [Text(f"✗ {printable(str(problem))}", BAD) for problem in problems]
    if result is not None:
        found = result.preflight
        warnings = [*([found.cpu_fallback] if found.cpu_fallback else []), *map(str, found.warnings)]
        lines += [Text(f"! {printable(warning)}", WARNING) for warning in warnings]
    if problems:
        lines.append(Text("The plan follows when all errors are fixed.", MUTED))
    elif other_host:
        lines.append(Text(f"{other_host}: it is checked when it starts there", MUTED))
    elif config is None or result is None:
        lines.append(Text("Checking this host …", MUTED))
    else:
        lines += [Text(line) for line in _plan_lines(config, result)]
    return Text("\n").join(lines)


def _plan_lines(config: Config, result: FormCheckResult) -> list[str]:
    found, sampler = result.preflight, result.sampler
    devices = pluralize(result.total_ranks, {True: "GPU", False: "CPU rank", None: "rank"}[found.on_gpu])
    global_batch = "auto"
    if config.data.batch_size != "auto":
        images = result.total_ranks * config.data.numeric_batch_size * config.optim.accumulate
        global_batch = str(images if sampler is None else sampler.global_batch)
    lines = [f"{devices}, global batch size {global_batch}"]
    lines += [f"Precision: {found.precision}"] if found.precision else []
    lines += [f"Input: {printable(found.input)}"] if found.input else []
    if sampler is None:
        return [*lines, "Images are counted at the start"]
    if steps := sampler.steps_per_epoch:
        lines.append(f"{steps:,} {'step' if steps == 1 else 'steps'} per epoch, {steps * config.run.epochs:,} total")
    return [*lines, f"{sampler.train_images:,} train, {sampler.val_images:,} val images"]


def field_facts(config: Config, result: FormCheckResult) -> dict[str, str]:
    """Return by key what the check found out about the value of a field."""
    facts = {"run.name": "" if config.run.name else "next free name"}
    on_gpu = result.preflight.on_gpu
    if on_gpu is not None:
        facts["device.gpus"] = pluralize(result.total_ranks, "GPU") if on_gpu else "trains on the CPU"
    facts["data.batch_size"] = "per rank" if on_gpu is False else "per GPU"
    if result.sampler is not None:
        images = f"{result.sampler.train_images + result.sampler.val_images:,} images"
        count, outputs = result.preflight.classes, task_facts(config).outputs
        # A single output is a number; there are at least two classes or labels.
        classes = "" if count is None else f"{count} {outputs.removesuffix('s') if count == 1 else outputs}, "
        facts["data.path" if config.data.path else "data.dataset"] = classes + images
    if config.optim.lr_scaling != "none":
        facts["optim.lr"] = f"{format_number(scaled_lr(config.optim, result.total_ranks))} after scaling"
    return facts
