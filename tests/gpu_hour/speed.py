"""Stage b: steps against a bare loop, precisions, compiled models, kernel launches, MFU and scaling."""

from __future__ import annotations

import statistics
from typing import Any

from stage import Context, Row, Run, Step, StepSkippedError

BATCH = 256
EPOCHS = 6
TWO_NCCL_BACKENDS = (2, 15)
# ResNet-18 on data of Fashion-MNIST's shape.
RESNET = ("data.dataset=fake", "data.image_size=28", "data.channels=1", "augment.crop_padding=2")
RESNET = (*RESNET, "model.name=resnet18-small", "precision.amp=bf16")
FLOAT32, TF32, BF16 = ("precision.tf32=off",), ("precision.tf32=on",), ("precision.amp=bf16",)
NCHW, NHWC = ("model.channels_last=off",), ("model.channels_last=on",)
MEMORY = "data.pipeline=memory"
SMALL = ("model.options={width: 2}",)
COMPILED = ("model.compile=true",)
GRAPHS = (*COMPILED, "model.compile_mode=reduce-overhead")


def describe_steps(title: str, measured: dict[str, Any]) -> Row:
    ours, launches = measured["ours"], measured["ours_launches"]
    parts = [f"{ours['ms']:.2f} ms per step, {ours['images_per_second']:,.0f} images/s"]
    if "ratio" in measured:
        parts.append(f"{measured['ratio']:.3f}x the time of the bare loop ({measured['bare']['ms']:.2f} ms)")
    for name, label in (("ours_launches", "launches"), ("bare_launches", "in the bare loop")):
        if (counts := measured.get(name)) and counts["kernels"] is not None:
            parts.append(f"{label} {counts['kernels']:.0f}")
    if launches["graphs"]:
        parts.append(f"graphs {launches['graphs']:.0f}")
    return Row(title, ", ".join([*parts, measured["memory_format"]]), measured)


def measure_steps(context: Context, title: str, *keys: str) -> list[Row]:
    sizes = (40, 7, BATCH) if context.machine.has_card else (1, 1, 2)
    small = () if context.machine.has_card else SMALL
    return [describe_steps(title, context.measure("measure_steps.py", *sizes, *small, *keys))]


def step(title: str, *keys: str, card: bool = False, limit_s: float = 60) -> Step:
    return Step(title, lambda context: measure_steps(context, title, *keys), limit_s, card=card)


def train_resnet(context: Context, name: str, gpus: int, *keys: str) -> Run:
    images = context.size(60_000, 64)
    sizes = (f"data.fake_train={images}", f"data.fake_val={images // 6}", f"data.batch_size={context.size(BATCH, 8)}")
    options = (f"--gpus=free:{gpus}", "--epochs", str(context.size(EPOCHS, 2)))
    small = () if context.machine.has_card else SMALL
    return context.train(name, *options, *RESNET, *sizes, *small, *keys)


def epoch_figures(run: Run) -> dict[str, float | None]:
    """Medians over all epochs but the first."""
    epochs = run.events("epoch")[1:]
    figures: dict[str, float | None] = {"mfu": run.summary.get("mfu")}
    for key in ("seconds", "images_per_second", "data_wait"):
        values = [epoch[key] for epoch in epochs if epoch.get(key) is not None]
        figures[key] = statistics.median(values) if values else None
    return figures


def epoch_row(title: str, run: Run, baseline: float | None = None) -> Row:
    figures = epoch_figures(run)
    rate = figures["images_per_second"] or 0.0
    parts = [f"{figures['seconds']:.2f} s per epoch, {rate:,.0f} images/s"]
    if baseline:
        parts.append(f"{rate / baseline:.2f}x")
    for key, label in (("mfu", "MFU"), ("data_wait", "data wait")):
        if (share := figures[key]) is not None:
            parts.append(f"{label} {share:.1%}")
    return Row(title, ", ".join(parts), figures)


def scale_over_gpus(context: Context) -> list[Row]:
    rows: list[Row] = []
    baseline = None
    for gpus in (count for count in (1, 2, 4, 8) if count <= len(context.machine.gpus)):
        run = train_resnet(context, f"gpus-{gpus}", gpus, MEMORY)
        rows.append(epoch_row(f"runs of ResNet-18 in bf16 on {gpus} GPU{'s' if gpus > 1 else ''}", run, baseline))
        baseline = baseline or rows[0].figures["images_per_second"]
    return rows


def compare_backends(context: Context) -> list[Row]:
    """Compare both NCCL backends: they differ in how gradients and compute overlap."""
    major, minor = map(int, context.machine.torch.split(".")[:2])
    if (major, minor) < TWO_NCCL_BACKENDS:
        raise StepSkippedError(f"torch {context.machine.torch} has one NCCL backend")
    return [
        epoch_row(f"ResNet-18 on two GPUs, {name}", train_resnet(context, name, 2, MEMORY, f"device.backend={name}"))
        for name in ("nccl-legacy", "nccl2")
    ]


def train_without_input(context: Context) -> list[Row]:
    run = train_resnet(context, "fixed", 1, "data.pipeline=fixed")
    return [epoch_row("runs of ResNet-18 in bf16 on a fixed batch", run)]


STEPS = [
    step("steps in bf16", *BF16),
    step("steps in TF32", *TF32),
    step("steps in float32", *FLOAT32),
    Step("runs on 1 to N GPUs", scale_over_gpus, 150),
    Step("NCCL backends", compare_backends, 90, gpus=2),
    step("steps in bf16, compiled", *BF16, *COMPILED, card=True, limit_s=120),
    step("steps in bf16, compiled, reduce-overhead", *BF16, *GRAPHS, card=True, limit_s=120),
    step("steps in bf16, contiguous", *BF16, *NCHW),
    step("steps in bf16, channels_last", *BF16, *NHWC),
    step("steps in TF32, channels_last", *TF32, *NHWC),
    step("steps in TF32, contiguous", *TF32, *NCHW),
    Step("steps without input", train_without_input, 60),
]
