"""Rules between config keys: which keys apply only with certain values of others, and which values conflict.

`engine.config.loader` reports the conflicts. The form hides keys without effect (DEPENDS_ON), and
`engine.config.effects` warns of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

from engine.config.data_sections import ENCODED_DATASETS, IMAGE_FILE_DATASETS, AugmentConfig
from engine.config.optimizer_options import optimizers_accepting, torch_optimizer_problems
from engine.config.schema import Config
from engine.config.training_sections import BUILTIN_MODELS, ScheduleConfig, by_epoch
from engine.config.user_code import is_user_code
from engine.utils.errors import Problem

_SCHEDULES = set(get_args(get_args(ScheduleConfig.model_fields["name"].annotation)[0]))
# Placeholder for any user code among the values in DEPENDS_ON.
ANY_USER_CODE = "module:name"
_SCHEDULES_WITH_WARMUP = _SCHEDULES - {"onecycle"} | {ANY_USER_CODE}
# Smallest positive alpha of mixup and CutMix: below it, the Beta distribution yields practically only 0 and 1.
MIN_MIX_ALPHA = 1e-3
# Levels of `precision.amp` that compute in float16.
FLOAT16_LEVELS = {"fp16", "O1", "O2", "O3"}
_SCHEDULES_WITH_FINAL_LR = {"cosine", "restarts", "polynomial", "linear", "plateau"}


# Files of all images that earlier versions wrote.
PACKED_SUFFIX = ".gpk"
PACKED_PROBLEM = "packed file, which is no longer read"
PACK_ADVICE = "write tar shards of its folder with `gputrain data pack FOLDER -o DIR`, and set data.path to DIR"

# Key -> (other key, values): the key has an effect only if the other key has one of these values.
DEPENDS_ON: dict[str, tuple[str, set[str]]] = {
    "device.bucket_view": ("device.parallel", {"ddp"}),
    "device.bucket_cap_mb": ("device.parallel", {"ddp"}),
    "device.compress": ("device.parallel", {"ddp"}),
    "device.static_graph": ("device.parallel", {"ddp"}),
    "data.download": ("data.dataset", {*IMAGE_FILE_DATASETS, "folder"}),
    "data.archive": ("data.dataset", {"folder"}),
    "data.checksum": ("data.archive", {"flower-photos"}),
    "data.val_split": ("data.dataset", {"digits", *ENCODED_DATASETS}),
    "data.fake_train": ("data.dataset", {"fake"}),
    "data.fake_val": ("data.dataset", {"fake"}),
    "data.path": ("data.dataset", {*IMAGE_FILE_DATASETS, *ENCODED_DATASETS, ANY_USER_CODE}),
    "data.val_path": ("data.dataset", {"webdataset"}),
    "data.workers": ("data.pipeline", {"auto", "stream"}),
    "data.worker_type": ("data.pipeline", {"auto", "stream"}),
    "data.prefetch": ("data.pipeline", {"auto", "stream"}),
    "data.allow_empty": ("data.dataset", {*ENCODED_DATASETS}),
    "data.on_bad": ("data.dataset", {*ENCODED_DATASETS, ANY_USER_CODE}),
    "augment.crop_scale": ("augment.resized_crop", {"true"}),
    "augment.crop_ratio": ("augment.resized_crop", {"true"}),
    "augment.policy_ops": ("augment.policy", {"randaugment"}),
    "augment.policy_magnitude": ("augment.policy", {"randaugment"}),
    "model.sync_bn": ("device.parallel", {"ddp"}),
    "model.compile_mode": ("model.compile", {"true"}),
    "model.init_std": ("model.init", {"normal"}),
    **{f"optim.{key}": ("optim.name", optimizers_accepting(key)) for key in ("momentum", "nesterov", "betas", "eps")},
    "optim.nonfinite_limit": ("optim.nonfinite", {"skip"}),
    "schedule.by": ("schedule.name", _SCHEDULES - {"constant", "plateau"} | {ANY_USER_CODE}),
    "schedule.warmup_epochs": ("schedule.name", _SCHEDULES_WITH_WARMUP),
    "schedule.warmup_steps": ("schedule.name", _SCHEDULES_WITH_WARMUP),
    "schedule.step_size": ("schedule.name", {"step"}),
    "schedule.milestones": ("schedule.name", {"multistep"}),
    "schedule.gamma": ("schedule.name", {"step", "multistep", "exponential", "plateau"}),
    "schedule.final_lr_ratio": ("schedule.name", _SCHEDULES_WITH_FINAL_LR),
    "schedule.restart_every": ("schedule.name", {"restarts"}),
    "schedule.restart_factor": ("schedule.name", {"restarts"}),
    "schedule.power": ("schedule.name", {"polynomial"}),
    "schedule.peak_at": ("schedule.name", {"onecycle"}),
    "schedule.start_factor": ("schedule.name", {"onecycle"}),
    "schedule.end_factor": ("schedule.name", {"onecycle"}),
    "schedule.patience": ("schedule.name", {"plateau"}),
    "schedule.threshold": ("schedule.name", {"plateau"}),
    "schedule.cooldown": ("schedule.name", {"plateau"}),
}


def config_conflicts(config: Config) -> Iterator[Problem]:
    """Yield the values that conflict with the value of another key or break a rule of their own."""
    for section in (
        _run_conflicts,
        _device_conflicts,
        _data_conflicts,
        _augment_conflicts,
        _model_conflicts,
        _optim_conflicts,
        _schedule_conflicts,
    ):
        yield from section(config)


def _run_conflicts(config: Config) -> Iterator[Problem]:
    for key in ("resume", "requeue"):
        if getattr(config.run, key) and config.run.name is None:
            reason = "needs the name of the run to resume; set run.name (--name)"
            yield Problem(f"run.{key}", reason, others=("run.name",), code="needs-key")


def _device_conflicts(config: Config) -> Iterator[Problem]:
    device = config.device
    if device.static_graph and device.parallel == "ddp" and config.optim.accumulate > 1:
        # pytorch#143580: DDP treats the backward passes under no_sync() as the whole graph.
        reason = "does not support gradient accumulation; set device.static_graph=false or optim.accumulate=1"
        yield Problem("device.static_graph", reason, others=("optim.accumulate",), code="conflict")
    if device.compress == "bf16" and config.precision.amp in ("O2", "O3"):
        reason = f"bf16 does not make the float16 gradients of precision.amp={config.precision.amp} smaller; use off"
        yield Problem("device.compress", reason, others=("precision.amp",), code="conflict")
    if device.parallel == "dp" and config.precision.amp == "bf16":
        # DataParallel enters autocast in its threads without a dtype, which means float16.
        reason = "device.parallel=dp does not support bf16; use fp16 or off, or set device.parallel=ddp"
        yield Problem("precision.amp", reason, others=("device.parallel",), code="conflict")


def _data_conflicts(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.default_path is None and data.dataset in (*IMAGE_FILE_DATASETS, *ENCODED_DATASETS):
        what = "its tar shards" if data.dataset == "webdataset" else "the folder of the dataset"
        reason = f"{data.dataset} needs {what}; set data.path (--data-path)"
        yield Problem("data.path", reason, others=("data.dataset",), is_missing=True, code="missing-value")
    if data.pipeline == "memory" and is_user_code(data.dataset):
        reason = (
            f"memory does not support {data.dataset}: user datasets may generate items at random; use stream or auto"
        )
        yield Problem("data.pipeline", reason, others=("data.dataset",), code="conflict")
    if (
        data.pipeline == "memory"
        and data.dataset in ENCODED_DATASETS
        and (key := key_of_original_size(config)) is not None
    ):
        reason = (
            f"memory holds images at the model's input size, but {key} {ORIGINAL_SIZE_REASONS[key]}; use stream or auto"
        )
        yield Problem("data.pipeline", reason, others=("data.dataset", key), code="conflict")
    if data.path is not None and data.path.endswith(PACKED_SUFFIX):
        yield Problem("data.path", f"{data.path} is a {PACKED_PROBLEM}", PACK_ADVICE, code="not-supported")
    if data.worker_type == "threads" and data.dataset not in ENCODED_DATASETS:
        reason = f"threads load image files ({', '.join(ENCODED_DATASETS)}), not {data.dataset}; use processes or auto"
        yield Problem("data.worker_type", reason, others=("data.dataset",), code="conflict")
    yield from _size_schedule_conflicts(config)
    val_size = data.val_crop or data.image_size or data.max_train_size
    if data.val_resize is not None and val_size is not None and data.val_resize < val_size:
        yield val_resize_problem(data.val_resize, val_size)
    for key in ("mean", "std"):
        values = getattr(data, key)
        if values is not None and data.channels is not None and len(values) != data.channels:
            reason = f"has {len(values)} values for data.channels={data.channels}; use one value per channel"
            yield Problem(f"data.{key}", reason, others=("data.channels",), code="conflict")
    if data.std is not None and min(data.std) <= 0:
        yield Problem("data.std", "must be greater than 0 for each channel", code="out-of-range")


# Keys that use the original size of an image in each epoch, and why.
ORIGINAL_SIZE_REASONS = {
    "augment.resized_crop": "crops images at their original size",
    "data.size_schedule": "resizes images from their original size",
}


def key_of_original_size(config: Config) -> str | None:
    """Return the key that uses the original size of the training images in each epoch; None if none does."""
    if config.augment.resized_crop:
        return "augment.resized_crop"
    return "data.size_schedule" if config.data.size_schedule else None


def key_of_image_transform(config: Config) -> str | None:
    """Return a key that transforms the training images one by one in Python, on the CPU; None if none does."""
    augment, default = config.augment, AugmentConfig()
    names = ("policy", "brightness", "contrast", "saturation", "hue", "transform")
    return next((f"augment.{name}" for name in names if getattr(augment, name) != getattr(default, name)), None)


def _size_schedule_conflicts(config: Config) -> Iterator[Problem]:
    key, epochs = "data.size_schedule", [epoch for epoch, _ in config.data.epoch_sizes]
    if not epochs:
        return
    if epochs[0] != 1:
        yield Problem(
            key,
            f"must begin with the size of epoch 1, such as 160@1, not with that of epoch {epochs[0]}",
            code="invalid-value",
        )
    if epochs != sorted(set(epochs)):
        yield Problem(key, "must have its epochs in increasing order, such as [160@1, 192@13]", code="invalid-value")
    elif epochs[-1] > config.run.epochs:
        reason = f"epoch {epochs[-1]} is not reached: run.epochs is {config.run.epochs}; use smaller epochs"
        yield Problem(key, reason, others=("run.epochs",), code="conflict")


def val_resize_problem(val_resize: int, val_size: int) -> Problem:
    """Return the problem of a center crop that is larger than the resized image, which torchvision pads with black."""
    reason = f"{val_resize} is less than the input size in evaluation, {val_size}"
    advice = f"set data.val_resize to at least {val_size}, or reduce data.val_crop"
    return Problem("data.val_resize", reason, advice, others=("data.val_crop", "data.image_size"), code="conflict")


def _augment_conflicts(config: Config) -> Iterator[Problem]:
    augment = config.augment
    for key, maximum in (("crop_scale", 1.0), ("crop_ratio", float("inf"))):
        low, high = getattr(augment, key)
        if not 0 < low <= high <= maximum:
            limit = " and at most 1" if maximum == 1.0 else ""
            yield Problem(
                f"augment.{key}", f"must be two numbers greater than 0{limit}, the smaller first", code="out-of-range"
            )
    for key in ("mixup", "cutmix"):
        if 0 < getattr(augment, key) < MIN_MIX_ALPHA:
            yield Problem(f"augment.{key}", f"must be 0 (disabled) or at least {MIN_MIX_ALPHA:g}", code="out-of-range")
    if augment.resized_crop and augment.crop_padding:
        reason = "conflicts with augment.resized_crop; set one of the two"
        yield Problem("augment.crop_padding", reason, others=("augment.resized_crop",), code="conflict")


def _model_conflicts(config: Config) -> Iterator[Problem]:
    model = config.model
    if (match := re.fullmatch(r"(builtin|torchvision|timm):(.+)", model.name)) is not None:
        yield Problem(
            "model.name",
            f"{model.name} is not allowed; set model.name={match[2]} model.source={match[1]}",
            code="invalid-value",
        )
    is_builtin = model.source in ("auto", "builtin") and model.name in BUILTIN_MODELS
    if model.weights == "pretrained" and (is_builtin or (model.source == "auto" and is_user_code(model.name))):
        reason = f"there are no pretrained weights for {model.name}; set model.weights=null, or to a file"
        yield Problem("model.weights", reason, others=("model.name", "model.source"), code="not-found")
    if model.compile and config.device.parallel == "dp":
        reason = "does not support device.parallel=dp, which replicates the model in every step; use ddp"
        yield Problem("model.compile", reason, others=("device.parallel",), code="conflict")
    if model.compile and model.compile_mode != "default" and config.optim.accumulate > 1:
        reason = (
            f"{model.compile_mode} replays CUDA graphs, which overwrite the gradients that optim.accumulate sums; "
            "use default"
        )
        yield Problem("model.compile_mode", reason, others=("model.compile", "optim.accumulate"), code="conflict")


def cpu_precision_warnings(config: Config, *, has_bfloat16: bool) -> list[Problem]:
    """Return a warning if `precision.amp` computes in float16, for a run on the CPU.

    Steps of a small CNN took 70 to 107 times as long as in float32 on a CPU with AVX512-FP16, and 7 times on one with
    AVX2: torch has fast float16 kernels for the forward pass at most. bfloat16 took 1.3 and 4.3 times as long.
    """
    amp = config.precision.amp
    if amp not in FLOAT16_LEVELS:
        return []
    reason = f"{amp} computes in float16, which is usually many times slower than float32 on the CPU"
    if has_bfloat16:
        advice = "use --amp bf16 or --amp off"
    else:
        advice = "use --amp off; bf16 is slow, too, because this CPU has no instructions for it"
    return [Problem("precision.amp", reason, advice, code="slow-precision")]


def _optim_conflicts(config: Config) -> Iterator[Problem]:
    optim = config.optim
    yield from torch_optimizer_problems(optim)
    if optim.betas is not None and not all(0 <= beta < 1 for beta in optim.betas):
        yield Problem("optim.betas", "must be two numbers of at least 0 and less than 1", code="out-of-range")
    for name, factor in optim.layer_lr.items():
        if factor < 0:
            yield Problem(
                "optim.layer_lr", f"the factor of {name} must be at least 0, not {factor:g}", code="out-of-range"
            )
    for name, decay in optim.weight_decay_groups.items():
        if decay < 0:
            yield Problem(
                "optim.weight_decay_groups",
                f"the weight decay of {name} must be at least 0, not {decay:g}",
                code="out-of-range",
            )
    if not optim.decay_norms and (groups := sorted({"bias", "norm"} & optim.weight_decay_groups.keys())):
        reason = f"exempts biases and normalization layers, but optim.weight_decay_groups sets {' and '.join(groups)}"
        yield Problem(
            "optim.decay_norms", f"{reason}; keep one", others=("optim.weight_decay_groups",), code="conflict"
        )


def _schedule_conflicts(config: Config) -> Iterator[Problem]:
    schedule, epochs = config.schedule, config.run.epochs
    warms_up = schedule.name != "onecycle"
    if warms_up and schedule.warmup_epochs > epochs:
        yield Problem(
            "schedule.warmup_epochs",
            f"must be at most run.epochs ({epochs})",
            others=("run.epochs",),
            code="out-of-range",
        )
    if warms_up and schedule.warmup_epochs and schedule.warmup_steps:
        reason = f"conflicts with schedule.warmup_epochs={schedule.warmup_epochs:g}; set one of the two to 0"
        yield Problem("schedule.warmup_steps", reason, others=("schedule.warmup_epochs",), code="conflict")
    yield from _milestone_conflicts(schedule, epochs)
    if schedule.name == "onecycle" and by_epoch(schedule) and epochs < 2:
        reason = "schedule onecycle by epoch needs at least two epochs; use step"
        yield Problem("schedule.by", reason, others=("schedule.name", "run.epochs"), code="conflict")
    if schedule.name == "plateau":
        if schedule.by == "step":
            reason = "schedule plateau reads the validation loss once per epoch; use epoch or auto"
            yield Problem("schedule.by", reason, others=("schedule.name",), code="conflict")
        if schedule.gamma == 1:
            yield Problem(
                "schedule.gamma",
                "must be less than 1 for schedule plateau",
                others=("schedule.name",),
                code="out-of-range",
            )


def _milestone_conflicts(schedule: ScheduleConfig, epochs: int) -> Iterator[Problem]:
    key, multistep = "schedule.milestones", schedule.name == "multistep"
    if list(schedule.milestones) != sorted(set(schedule.milestones)) or min(schedule.milestones, default=1) < 1:
        yield Problem(key, "must be integers of at least 1 in increasing order", code="invalid-value")
    elif multistep and not schedule.milestones:
        yield Problem(
            key,
            "schedule multistep needs at least one milestone, such as [30, 60]",
            others=("schedule.name",),
            code="missing-value",
        )
    elif multistep and by_epoch(schedule) and schedule.milestones[0] >= epochs:
        reason = f"no milestone is reached: run.epochs is {epochs}; use smaller milestones"
        yield Problem(key, reason, others=("schedule.name", "schedule.by", "run.epochs"), code="conflict")
