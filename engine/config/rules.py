"""Rules between config keys: which keys apply only with certain values of others, and which values conflict.

`engine.config.loader` reports the conflicts. The form hides keys without effect (DEPENDS_ON), and
`engine.config.effects` warns of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

from engine.base.errors import Problem
from engine.config.data_sections import ENCODED_DATASETS, IMAGE_FILE_DATASETS, AugmentConfig
from engine.config.optimizer_options import optimizers_accepting
from engine.config.schema import Config
from engine.config.training_sections import ScheduleConfig

_SCHEDULES = set(get_args(get_args(ScheduleConfig.model_fields["name"].annotation)[0]))
# Placeholder for any user code among the values in DEPENDS_ON.
ANY_USER_CODE = "module:name"
_SCHEDULES_WITH_WARMUP = _SCHEDULES - {"onecycle"} | {ANY_USER_CODE}
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
    "data.label_columns": ("data.dataset", {"csv"}),
    "task.name": ("data.dataset", {"csv"}),
    "data.workers": ("data.pipeline", {"auto", "stream"}),
    "data.worker_type": ("data.pipeline", {"auto", "stream"}),
    "data.prefetch": ("data.pipeline", {"auto", "stream"}),
    "data.allow_empty": ("data.dataset", {*ENCODED_DATASETS}),
    "data.on_bad": ("data.dataset", {*ENCODED_DATASETS, ANY_USER_CODE}),
    "augment.crop_scale": ("augment.resized_crop", {"true"}),
    "augment.crop_ratio": ("augment.resized_crop", {"true"}),
    "augment.policy_ops": ("augment.policy", {"randaugment"}),
    "augment.policy_magnitude": ("augment.policy", {"randaugment"}),
    "augment.policy_magnitude_std": ("augment.policy", {"randaugment"}),
    "loss.focal_gamma": ("loss.name", {"focal"}),
    "loss.focal_alpha": ("loss.name", {"focal"}),
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


@dataclass(frozen=True)
class Rule:
    """A rule between config keys. `why` returns why the value of `key` breaks it, "" if it does not; `others` are the
    keys that decide it. `code`, `advice` and `is_missing` are those of the problem."""

    key: str
    others: tuple[str, ...]
    why: Callable[[Config], str]
    advice: str = ""
    is_missing: bool = False
    code: str = field(default="no-effect", kw_only=True)


def broken_if(is_broken: Callable[[Config], object], reason: str) -> Callable[[Config], str]:
    """Return a `Rule.why` with a fixed reason, in which `{section.key}` stands for the value of a key."""
    return lambda config: reason.format(**dict(config)) if is_broken(config) else ""


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
    affine, color = ("rotation", "translate", "scale", "shear"), ("brightness", "contrast", "saturation", "hue")
    names = (*affine, "policy", *color, "grayscale", "blur", "transform")
    return next((f"augment.{name}" for name in names if getattr(augment, name) != getattr(default, name)), None)


def val_resize_problem(val_resize: int | None, val_size: int | None) -> str:
    """Return the problem of a center crop that is larger than the resized image, which torchvision pads with black; ""
    if it is not."""
    if val_resize is None or val_size is None or val_resize >= val_size:
        return ""
    advice = f"set data.val_resize to at least {val_size}, or reduce data.val_crop"
    return f"{val_resize} is less than the input size in evaluation, {val_size}; {advice}"


def cpu_precision_warnings(config: Config, *, has_bfloat16: bool) -> list[Problem]:
    """Return a warning if `precision.amp` computes in float16, for a run on the CPU.

    Steps of a small CNN took 70 to 107 times as long as in float32 on a CPU with AVX512-FP16, and 7 times on one with
    AVX2: torch has fast float16 kernels for the forward pass at most. bfloat16 took 1.3 and 4.3 times as long.
    """
    amp = config.precision.amp
    if amp not in FLOAT16_LEVELS:
        return []
    reason = f"{amp} computes in float16, which is usually many times slower than float32 on the CPU"
    advice = "use --amp off; bf16 is slow, too, because this CPU has no instructions for it"
    if has_bfloat16:
        advice = "use --amp bf16 or --amp off"
    return [Problem("precision.amp", reason, advice, code="slow-precision")]
