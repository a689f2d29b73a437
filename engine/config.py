"""The one schema of a run. YAML, command line, form, validation and documentation all come from it.

A config is frozen and knows nothing of where its values came from; `engine.resolve` lays the layers over each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic.fields import FieldInfo


def _as_text(value: object) -> object:
    """A name like 2024 is a number to YAML and a name to its writer."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _as_selection(value: object) -> object:
    """`[0, 2]`, `0`, `"0,2"` and `"[0, 2]"` all name GPUs."""
    if isinstance(value, str):
        value = value.strip("[] ").split(",")
    if isinstance(value, list | tuple) and all(isinstance(part, str | int) for part in value):
        return ",".join(str(part).strip() for part in value)
    return _as_text(value)


Text = Annotated[str, BeforeValidator(_as_text)]
Selection = Annotated[str, BeforeValidator(_as_selection)]
Floats = Annotated[tuple[float, ...], Strict(False)]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

IMAGE_FILE_DATASETS = ("mnist", "fashion-mnist", "cifar10", "cifar100")
DatasetName = Literal["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "folder", "fake"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Run(Section):
    name: Annotated[Text, Field(pattern=NAME, max_length=100)] | None = Field(
        None, description="Name of the run and of its folder; made from the config's name and a number when left out."
    )
    epochs: int = Field(10, ge=1, le=10**9, description="Times that training goes through the data.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the split, the order, the augmentation and the model.")
    resume: bool = Field(False, description="Continue the run of this name from its last checkpoint, if it exists.")
    log_every: int = Field(10, ge=1, description="Steps between two `step` events.")
    watchdog: float = Field(
        600.0,
        ge=0,
        description="Seconds without a step of any rank after which the run fails; 0 for no limit. To be more than the "
        "longest step or save takes.",
    )
    max_restarts: int = Field(
        0,
        ge=0,
        description="Times that a run whose rank failed is started again from its last checkpoint; under torchrun its "
        "own --max-restarts counts.",
    )
    requeue: bool = Field(
        False,
        description="Put the SLURM job back into the queue when SIGUSR1 (sbatch --signal=USR1@60) stops the run. "
        "Includes run.resume.",
    )


class Device(Section):
    gpus: Selection = Field(
        "auto",
        min_length=1,
        description="GPUs to train on: auto (those that nobody computes on, else the CPU), all, cpu, free:N, "
        "indices such as 0,2, or UUIDs.",
    )
    wait: bool = Field(False, description="Wait until the GPUs are free, and take them in turn with others who wait.")
    ranks: int = Field(1, ge=1, description="Processes that train when on the CPU; on GPUs there is one for each.")
    launcher: Literal["auto", "spawn", "env", "slurm"] = Field(
        "auto", description="Who starts the ranks: gputrain itself (spawn), torchrun (env), srun (slurm), or found out."
    )
    deterministic: bool = Field(False, description="Only deterministic algorithms: the same bits each time, slower.")
    cudnn_benchmark: bool = Field(True, description="Let cuDNN try its algorithms and keep the fastest.")
    timeout: float = Field(600.0, gt=0, description="Seconds that a rank waits for another before the run fails.")


class Data(Section):
    dataset: DatasetName = Field(
        "digits",
        description="Digits (shipped), mnist, fashion-mnist, cifar10, cifar100, a folder of images, or fake ones.",
    )
    path: Text | None = Field(None, description="Folder that the data lies in; digits and fake need none.")
    download: bool = Field(False, description="Fetch a missing torchvision dataset into data.path.")
    batch_size: int = Field(64, ge=1, le=10**9, description="Images a rank takes at each step.")
    drop_last: bool = Field(True, description="Leave out the last, partial batch of a training epoch.")
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="Loader processes a rank; auto is cores / ranks, at most 8, and 0 where data is in memory.",
    )
    prefetch: int = Field(4, ge=1, description="Batches that a loader process prepares ahead.")
    image_size: int | None = Field(
        None, ge=1, description="Height and width that images are brought to; the dataset's own when left out."
    )
    channels: Literal[1, 3] | None = Field(
        None, description="1 for grey, 3 for colour; the dataset's own when left out."
    )
    num_classes: int | None = Field(
        None, ge=2, description="Classes; must agree with the data where given, and says how many for fake."
    )
    val_split: float = Field(
        0.2, gt=0, lt=1, description="Share of each class kept for validation where the data has no validation part."
    )
    crop_padding: int = Field(0, ge=0, description="Pixels of border for random crops in training; 0 for no crop.")
    flip: bool = Field(False, description="Mirror training images left to right, each with probability one half.")
    mean: Floats | None = Field(
        None,
        min_length=1,
        max_length=3,
        description="Mean of each channel, on 0 to 1; the dataset's own when left out.",
    )
    std: Floats | None = Field(
        None,
        min_length=1,
        max_length=3,
        description="Standard deviation of each channel, on 0 to 1; the dataset's own when left out.",
    )
    on_bad: Literal["fail", "skip"] = Field(
        "fail", description="An image that can no longer be read while training: fail, or skip it and count it."
    )
    fake_train: int = Field(1024, ge=1, le=10**9, description="Training images that fake makes.")
    fake_val: int = Field(256, ge=1, le=10**9, description="Validation images that fake makes.")


class Model(Section):
    name: Text = Field(
        "cnn", min_length=1, description="cnn, resnet18-small, linear, or a torchvision classification model."
    )
    init: Literal["default", "normal"] = Field(
        "default", description="Starting weights: the library's own, or normal with deviation model.init_std."
    )
    init_std: float = Field(0.02, gt=0, description="Standard deviation of the weights for model.init normal.")


class Optim(Section):
    name: Literal["sgd", "adam", "adamw"] = Field("sgd", description="Optimizer: sgd, adam or adamw.")
    lr: float = Field(0.05, gt=0, description="Highest learning rate of the schedule, before optim.lr_scaling.")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="Multiply the learning rate by the number of ranks (linear), its square root, or not at all.",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of sgd.")
    nesterov: bool = Field(False, description="Nesterov's form of sgd's momentum.")
    betas: Annotated[tuple[float, float], Strict(False)] = Field(
        (0.9, 0.999), description="Decay rates of adam's and adamw's running averages."
    )
    eps: float = Field(1e-8, gt=0, description="Term added to adam's and adamw's denominator.")
    weight_decay: float = Field(
        0.0, ge=0, description="Weight decay (L2 penalty for sgd and adam, decoupled for adamw)."
    )
    nonfinite: Literal["halt", "skip"] = Field(
        "halt",
        description="A step whose loss or gradient is NaN or infinite on any rank: halt the run, or skip the step.",
    )
    nonfinite_limit: int = Field(
        10, ge=1, description="Steps in a row that optim.nonfinite skip leaves out before the run fails after all."
    )


class Schedule(Section):
    name: Literal["constant", "step", "multistep", "cosine"] = Field(
        "constant", description="How the learning rate goes on after the warm-up: constant, step, multistep or cosine."
    )
    warmup_epochs: float = Field(
        0.0, ge=0, description="Epochs in which the learning rate grows linearly from nothing."
    )
    step_epochs: int = Field(10, ge=1, description="Epochs between two falls of schedule step.")
    milestones: Annotated[tuple[int, ...], Strict(False)] = Field(
        (), description="Epochs after which schedule multistep falls."
    )
    gamma: float = Field(0.1, gt=0, le=1, description="Factor of each fall of schedules step and multistep.")
    final_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="Learning rate at the end of schedule cosine, as a share of the highest."
    )


class Precision(Section):
    amp: Literal["off", "fp16", "bf16"] = Field(
        "off", description="Automatic mixed precision: off, fp16 (with a gradient scaler) or bf16."
    )


class Checkpoint(Section):
    keep: int = Field(3, ge=1, description="Newest checkpoints kept beside the best.")
    every_epochs: int = Field(
        1, ge=1, description="Epochs between two checkpoints; the best so far and the last are saved as well."
    )
    every_steps: int = Field(0, ge=0, le=10**9, description="Steps between two checkpoints; 0 for none by steps.")
    every_minutes: float = Field(10.0, ge=0, description="Minutes between two checkpoints; 0 for none by the clock.")


class Config(Section):
    """Everything that a run depends on, and nothing else."""

    run: Run = Field(Run(), description="The run itself.")
    device: Device = Field(Device(), description="Where it trains.")
    data: Data = Field(Data(), description="What it trains on, and how that is fed.")
    model: Model = Field(Model(), description="What is trained.")
    optim: Optim = Field(Optim(), description="How weights are changed.")
    schedule: Schedule = Field(Schedule(), description="How the learning rate goes.")
    precision: Precision = Field(Precision(), description="What numbers it computes with.")
    checkpoint: Checkpoint = Field(Checkpoint(), description="What is saved.")


def sections() -> dict[str, type[Section]]:
    """Name of each section -> its model, in the order of the schema."""
    return {name: type(field.default) for name, field in Config.model_fields.items()}


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every key, as `section.key`, with its pydantic field."""
    for section, model in sections().items():
        for name, field in model.model_fields.items():
            yield f"{section}.{name}", field


# Keys that matter only where another key has one of these values.
ONLY_WITH: dict[str, tuple[str, set[str]]] = {
    "data.download": ("data.dataset", set(IMAGE_FILE_DATASETS)),
    "data.val_split": ("data.dataset", {"digits", "folder"}),
    "data.fake_train": ("data.dataset", {"fake"}),
    "data.fake_val": ("data.dataset", {"fake"}),
    "data.path": ("data.dataset", {*IMAGE_FILE_DATASETS, "folder"}),
    "model.init_std": ("model.init", {"normal"}),
    "optim.momentum": ("optim.name", {"sgd"}),
    "optim.nesterov": ("optim.name", {"sgd"}),
    "optim.betas": ("optim.name", {"adam", "adamw"}),
    "optim.eps": ("optim.name", {"adam", "adamw"}),
    "optim.nonfinite_limit": ("optim.nonfinite", {"skip"}),
    "data.on_bad": ("data.dataset", {"folder"}),
    "schedule.step_epochs": ("schedule.name", {"step"}),
    "schedule.milestones": ("schedule.name", {"multistep"}),
    "schedule.gamma": ("schedule.name", {"step", "multistep"}),
    "schedule.final_lr_ratio": ("schedule.name", {"cosine"}),
}


def is_text(field: FieldInfo) -> bool:
    """Whether a field takes a name, a path or a selection, and not a number or one of a few words."""
    kinds = [field.annotation, *get_args(field.annotation)]
    return any(kind is str or (get_origin(kind) is Annotated and get_args(kind)[0] is str) for kind in kinds)


def describe(key: str) -> str:
    """The one-line description of `section.key`, with its default where it has one."""
    section, _, name = key.partition(".")
    field = sections()[section].model_fields[name]
    default = "" if field.default in (None, ()) else f" [default: {field.default}]"
    return f"{field.description}{default}"


def as_dict(config: Config, *, only_changed: bool = False) -> dict[str, dict[str, Any]]:
    """Plain values by section, fit for YAML and JSON; with `only_changed` what differs from the defaults."""
    values: dict[str, dict[str, Any]] = config.model_dump(mode="json")
    if not only_changed:
        return values
    default = Config().model_dump(mode="json")
    changed = {
        section: {key: value for key, value in keys.items() if value != default[section][key]}
        for section, keys in values.items()
    }
    return {section: keys for section, keys in changed.items() if keys}


def impossible_pairs(config: Config) -> Iterator[tuple[str, str]]:
    """Key and reason of each value that another value makes impossible."""
    data, optim, schedule = config.data, config.optim, config.schedule
    for key in ("resume", "requeue"):
        if getattr(config.run, key) and config.run.name is None:
            yield f"run.{key}", "needs the name of the run to continue: give run.name (--name)"
    if data.path is None and data.dataset not in ("digits", "fake"):
        yield "data.path", f"{data.dataset} needs the folder that it lies in: give data.path (--data-path)"
    if data.download and data.dataset not in IMAGE_FILE_DATASETS:
        yield "data.download", f"{data.dataset} cannot be downloaded, only {', '.join(IMAGE_FILE_DATASETS)} can"
    for key in ("mean", "std"):
        given = getattr(data, key)
        if given is not None and data.channels is not None and len(given) != data.channels:
            yield f"data.{key}", f"has {len(given)} values for data.channels={data.channels}; give one for each channel"
    if data.std is not None and min(data.std) <= 0:
        yield "data.std", "must be greater than 0 for each channel"
    if optim.nesterov and optim.momentum == 0:
        yield "optim.nesterov", "needs optim.momentum greater than 0"
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield "optim.betas", "must each be at least 0 and less than 1"
    if schedule.warmup_epochs > config.run.epochs:
        yield "schedule.warmup_epochs", f"must be at most run.epochs ({config.run.epochs})"
    if schedule.name == "multistep" and not schedule.milestones:
        yield "schedule.milestones", "schedule multistep needs at least one epoch, such as [30, 60]"
    if list(schedule.milestones) != sorted(set(schedule.milestones)) or min(schedule.milestones, default=1) < 1:
        yield "schedule.milestones", "must be epochs from 1 up, each later than the one before"
