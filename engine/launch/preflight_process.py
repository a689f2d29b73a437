"""Helper process of the form: runs the preflight of a config, or builds its model.

The screen must not import torch, and must be able to cancel a check, such as the scan of a large folder.
`tui.form.checks` starts it.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.config.precision import describe_precision, uses_tf32
from engine.config.schema import Config
from engine.data.sources.base import ImageSource
from engine.data.sources.formats import expected_input_format
from engine.data.sources.open import open_source_for_preflight
from engine.gpus.allocation import GpuAllocation, preview_allocation
from engine.gpus.selection import CudaDevice
from engine.gpus.snapshot import Snapshot
from engine.launch.input_keys import with_input_keys
from engine.launch.preflight import Preflight, RunRequest, run_preflight
from engine.utils.codec import decode
from engine.utils.errors import UsageError, problems_from_json, problems_to_json
from engine.utils.helper_process import ParentPipe

# Values of other keys leave the scan of a dataset valid.
SCAN_KEYS = {
    *("dataset", "path", "val_path", "allow_empty", "download", "val_split"),
    *("num_classes", "image_size", "size_schedule", "channels", "fake_train", "fake_val"),
}


def scan_key(config: Config) -> str:
    """Return a key of the settings that select the dataset, and the user code that loads it, which may hang."""
    user_code = f"{config.augment.transform} {config.run.code}"
    return f"{config.data.model_dump_json(include=SCAN_KEYS)} {config.run.seed} {user_code}"


def main(parent: ParentPipe) -> None:
    """Answer each request: the problems of its config, and the images and ranks of the run."""
    sources: dict[str, ImageSource | None] = {}
    for request in parent.requests(dict[str, Any]):
        parent.send(_check_model(request) if request["task"] == "model" else _check_request(request, sources))


def _check_request(values: dict[str, Any], sources: dict[str, ImageSource | None]) -> dict[str, Any]:
    problems = tuple(problems_from_json(values["problems"]))
    request = RunRequest(
        Config.model_validate(values["config"]),
        Path(values["runs_dir"]),
        "form",
        dry_run=True,
        problems=problems,
        typed=frozenset(values["typed"]),
        warnings=tuple(problems_from_json(values["warnings"])),
    )
    request = with_input_keys(request)

    allocation = GpuAllocation()

    def choose_gpus(wait: bool) -> list[CudaDevice]:
        nonlocal allocation
        device = request.config.device
        snapshot = decode(values["snapshot"], Snapshot) if values["snapshot"] else None
        try:
            allocation = preview_allocation(
                device.gpus, snapshot, wait=request.config.waits, share=request.config.queue.share
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
    plan, counts, source, schedule = preflight.plan, preflight.counts, preflight.source, preflight.schedule
    return {
        "problems": problems_to_json(preflight.problems),
        "devices": 0 if plan is None else plan.local_world_size * plan.devices_per_rank,
        "cpu_fallback": "" if allocation.cpu_fallback is None else str(allocation.cpu_fallback),
        "warnings": problems_to_json(
            [
                *(warning for warning in allocation.warnings if warning != allocation.cpu_fallback),
                *preflight.warnings,
            ]
        ),
        "on_gpu": None if plan is None else plan.on_gpu,
        "batch_size": preflight.batch_size,
        "images": None if counts is None else [counts.train, counts.val],
        "classes": None if source is None else len(source.classes),
        "schedule": None if schedule is None else asdict(schedule),
        "input": _describe_input(request),
        "precision": _describe_precision(request.config, preflight),
    }


def _describe_input(request: RunRequest) -> str:
    """Return the model's input as the run will show it; "" if it has the default transform of its dataset."""
    if not request.input_source:
        return ""
    return f"{expected_input_format(request.config).describe()}, {request.input_source}"


def _describe_precision(config: Config, preflight: Preflight) -> str:
    """Return precision and NUMA nodes as the run will show them; the memory format follows from the model. "" on the
    CPU, and while the devices are unknown."""
    plan = preflight.plan
    if plan is None or not plan.on_gpu:
        return ""
    tf32 = uses_tf32(config.precision, plan.capability)
    return describe_precision(preflight.amp, tf32=tf32, numa=plan.describe_numa())


def _check_model(values: dict[str, Any]) -> dict[str, Any]:
    from engine.launch.model_check import check_model, torch_gpu_problems

    gpu_problems = torch_gpu_problems() if values.get("check_gpus") else []
    request = with_input_keys(RunRequest(Config.model_validate(values["config"]), Path(values["runs_dir"]), "form"))
    answer = check_model(request.config, on_gpu=values["on_gpu"])
    return answer | {"problems": [*problems_to_json(gpu_problems), *answer.get("problems", ())]}
