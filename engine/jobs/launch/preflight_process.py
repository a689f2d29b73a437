"""Helper process of the form: runs the preflight of a config.

The screen must not import torch, and must be able to cancel a check, such as the scan of a large folder.
`tui.form.checks` starts it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.base.codec import Count, Record, field
from engine.base.errors import Problem, UsageError
from engine.base.helper_process import ParentPipe
from engine.config.precision import describe_precision, uses_tf32
from engine.config.schema import Config
from engine.gpus.allocation import GpuAllocation
from engine.gpus.device_preview import preview_allocation
from engine.gpus.selection import CudaDevice
from engine.gpus.snapshot import Snapshot
from engine.jobs.launch.preflight import Preflight, run_preflight, with_input_keys
from engine.jobs.launch.request import RunRequest
from engine.jobs.queue.place import fixed_terms
from engine.train.data.inspection_process import ImageCounts
from engine.train.data.sources.base import ImageSource
from engine.train.data.sources.open import expected_input_format, open_source_for_preflight

# Values of other keys leave the scan of a dataset valid.
SCAN_KEYS = {
    *("dataset", "path", "val_path", "label_columns", "allow_empty", "on_bad", "download", "val_split"),
    *("num_classes", "image_size", "size_schedule", "channels", "fake_train", "fake_val"),
}


class PreflightRequest(Record, frozen=True, kw_only=True):
    """Request for the preflight of a config, the valid part of what was typed if it has `problems`.

    `typed` are the keys that the user typed, `warnings` those of the config."""

    config: dict[str, Any]
    runs_dir: str
    problems: list[Problem]
    typed: list[str]
    warnings: list[Problem]
    snapshot: Snapshot | None


class PreflightResult(Record, frozen=True, kw_only=True):
    """The problems of a config; the devices and the images of its run as far as they are known.

    `devices` is 0 and `on_gpu` None while the devices are unknown, `batch_size` and `images` are None if they are."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    devices: Count = 0
    on_gpu: bool | None = None
    cpu_fallback: str = ""
    batch_size: Count | None = None
    images: ImageCounts | None = None
    classes: Count | None = None
    input: str = ""
    precision: str = ""


def scan_key(config: Config) -> str:
    """Return a key of the settings that select the dataset, and the user code that loads it, which may hang."""
    user_code = f"{config.augment.transform} {config.run.code}"
    return f"{config.data.model_dump_json(include=SCAN_KEYS)} {config.task.name} {config.run.seed} {user_code}"


def main(parent: ParentPipe) -> None:
    """Answer each request: the problems of its config, and the images and ranks of the run."""
    sources: dict[str, ImageSource | None] = {}
    for request in parent.requests(PreflightRequest):
        parent.send(check_request(request, sources))


def check_request(form: PreflightRequest, sources: dict[str, ImageSource | None]) -> PreflightResult:
    """Run the preflight. `sources` keeps the opened datasets by their `scan_key`."""
    request = RunRequest(
        Config.model_validate(form.config),
        Path(form.runs_dir),
        "form",
        dry_run=True,
        problems=tuple(form.problems),
        typed=frozenset(form.typed),
        warnings=tuple(form.warnings),
    )
    request = with_input_keys(request)

    allocation = GpuAllocation()

    def choose_gpus(wait: bool) -> list[CudaDevice]:
        nonlocal allocation
        device, snapshot = request.config.device, form.snapshot
        try:
            allocation = preview_allocation(
                device.gpus, snapshot, wait=request.config.waits, terms=fixed_terms(request.config)
            )
            gpus = allocation.devices
        except UsageError:
            if snapshot is not None and not snapshot.pending:
                raise
            gpus = []
        if not gpus and device.gpus != "cpu" and (snapshot is None or snapshot.pending):
            # A driver that has not answered yet is not a fault of the config.
            raise UsageError([])
        return gpus

    def open_source(config: Config) -> ImageSource | None:
        if (key := scan_key(config)) not in sources:
            sources[key] = open_source_for_preflight(config)
        return sources[key]

    preflight = run_preflight(request, choose_gpus, open_source=open_source)
    plan, source = preflight.plan, preflight.source
    return PreflightResult(
        problems=list(preflight.problems),
        warnings=[
            *(warning for warning in allocation.warnings if warning != allocation.cpu_fallback),
            *preflight.warnings,
        ],
        devices=0 if plan is None else plan.local_world_size * plan.devices_per_rank,
        on_gpu=None if plan is None else plan.on_gpu,
        cpu_fallback="" if allocation.cpu_fallback is None else str(allocation.cpu_fallback),
        batch_size=preflight.batch_size,
        images=preflight.counts,
        classes=None if source is None else len(source.classes),
        # As the run will show it, unless it has the default transform of its dataset.
        input=f"{expected_input_format(request.config).describe()}, {request.input_source}"
        if request.input_source
        else "",
        precision=_describe_precision(request.config, preflight),
    )


def _describe_precision(config: Config, preflight: Preflight) -> str:
    """Return the precision as the run will show it; the memory format follows from the model. "" on the
    CPU, and while the devices are unknown."""
    plan = preflight.plan
    if plan is None or not plan.on_gpu:
        return ""
    tf32 = uses_tf32(config.precision, plan.capability)
    return describe_precision(preflight.amp, tf32=tf32)
