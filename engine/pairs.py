"""Keys that depend on others: those that matter only beside some values, and values that others make impossible."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import Config
from engine.sections import IMAGE_FILE_DATASETS

_WITH_EPS = {"adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adadelta", "adamax", "muon"}
_DECAYING = {"cosine", "restarts", "polynomial", "linear", "plateau"}

# Keys that matter only where another key has one of these values.
ONLY_WITH: dict[str, tuple[str, set[str]]] = {
    "data.download": ("data.dataset", set(IMAGE_FILE_DATASETS)),
    "data.val_split": ("data.dataset", {"digits", "folder"}),
    "data.fake_train": ("data.dataset", {"fake"}),
    "data.fake_val": ("data.dataset", {"fake"}),
    "data.path": ("data.dataset", {*IMAGE_FILE_DATASETS, "folder"}),
    "data.on_bad": ("data.dataset", {"folder"}),
    "augment.crop_scale": ("augment.resized_crop", {"true"}),
    "augment.crop_ratio": ("augment.resized_crop", {"true"}),
    "augment.policy_ops": ("augment.policy", {"randaugment"}),
    "augment.policy_magnitude": ("augment.policy", {"randaugment"}),
    "model.init_std": ("model.init", {"normal"}),
    "optim.momentum": ("optim.name", {"sgd", "rmsprop", "muon"}),
    "optim.nesterov": ("optim.name", {"sgd", "muon"}),
    "optim.betas": ("optim.name", {"adam", "adamw", "nadam", "radam", "adamax", "muon"}),
    "optim.eps": (
        "optim.name",
        {"adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adadelta", "adamax", "muon"},
    ),
    "optim.nonfinite_limit": ("optim.nonfinite", {"skip"}),
    "schedule.step_size": ("schedule.name", {"step"}),
    "schedule.milestones": ("schedule.name", {"multistep"}),
    "schedule.gamma": ("schedule.name", {"step", "multistep", "exponential", "plateau"}),
    "schedule.final_lr_ratio": ("schedule.name", _DECAYING),
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


def impossible_pairs(config: Config) -> Iterator[tuple[str, str]]:
    """Key and reason of each value that another value makes impossible."""
    for section in (_of_run, _of_data, _of_augment, _of_optim, _of_schedule):
        yield from section(config)


def _of_run(config: Config) -> Iterator[tuple[str, str]]:
    for key in ("resume", "requeue"):
        if getattr(config.run, key) and config.run.name is None:
            yield f"run.{key}", "needs the name of the run to continue: give run.name (--name)"


def _of_data(config: Config) -> Iterator[tuple[str, str]]:
    data = config.data
    if data.path is None and data.dataset in (*IMAGE_FILE_DATASETS, "folder"):
        yield "data.path", f"{data.dataset} needs the folder that it lies in: give data.path (--data-path)"
    if data.download and data.dataset not in IMAGE_FILE_DATASETS:
        yield "data.download", f"{data.dataset} cannot be downloaded, only {', '.join(IMAGE_FILE_DATASETS)} can"
    for key in ("mean", "std"):
        given = getattr(data, key)
        if given is not None and data.channels is not None and len(given) != data.channels:
            yield f"data.{key}", f"has {len(given)} values for data.channels={data.channels}; give one for each channel"
    if data.std is not None and min(data.std) <= 0:
        yield "data.std", "must be greater than 0 for each channel"


def _of_augment(config: Config) -> Iterator[tuple[str, str]]:
    augment = config.augment
    for key, most in (("crop_scale", 1.0), ("crop_ratio", float("inf"))):
        low, high = getattr(augment, key)
        if not 0 < low <= high <= most:
            limit = " and at most 1" if most == 1.0 else ""
            yield f"augment.{key}", f"must be two numbers greater than 0{limit}, the smaller one first"
    if augment.resized_crop and augment.crop_padding:
        yield "augment.crop_padding", "and augment.resized_crop are two ways to crop; keep one"


def _of_optim(config: Config) -> Iterator[tuple[str, str]]:
    optim = config.optim
    if optim.nesterov and optim.momentum == 0:
        yield "optim.nesterov", "needs optim.momentum greater than 0"
    if optim.betas is not None and not all(0 <= beta < 1 for beta in optim.betas):
        yield "optim.betas", "must each be at least 0 and less than 1"
    for name, factor in optim.layer_lr.items():
        if factor < 0:
            yield "optim.layer_lr", f"the factor of {name} must be at least 0, not {factor:g}"


def _of_schedule(config: Config) -> Iterator[tuple[str, str]]:
    schedule = config.schedule
    if schedule.warmup_epochs > config.run.epochs:
        yield "schedule.warmup_epochs", f"must be at most run.epochs ({config.run.epochs})"
    if schedule.warmup_epochs and schedule.warmup_steps:
        yield "schedule.warmup_steps", "and schedule.warmup_epochs are two lengths of one warm-up; keep one"
    if schedule.name == "multistep" and not schedule.milestones:
        yield "schedule.milestones", "schedule multistep needs at least one epoch, such as [30, 60]"
    if list(schedule.milestones) != sorted(set(schedule.milestones)) or min(schedule.milestones, default=1) < 1:
        yield "schedule.milestones", "must be epochs from 1 up, each later than the one before"
