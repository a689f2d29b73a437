"""The config sections about learning: `model`, `loss`, `optim`, `schedule` and `precision`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Strict

from engine.config.section import Factors, FloatPair, Options, Section, Text, UserCodePath, _as_name_prefixes

BUILTIN_MODELS = ("cnn", "linear", "resnet18-small")


_EPOCH_SCHEDULES = {"step", "multistep", "exponential", "restarts", "plateau"}


def by_epoch(schedule: ScheduleConfig) -> bool:
    """Whether the rate changes only at the ends of epochs, and the schedule's numbers count them."""
    return schedule.by == "epoch" or (schedule.by == "auto" and schedule.name in _EPOCH_SCHEDULES)


def warmup_steps(schedule: ScheduleConfig, steps_per_epoch: int) -> int:
    return schedule.warmup_steps or round(schedule.warmup_epochs * steps_per_epoch)


OptimizerName = Literal[
    "sgd",
    "adam",
    "adamw",
    "nadam",
    "radam",
    "rmsprop",
    "adagrad",
    "adadelta",
    "adamax",
    "asgd",
    "rprop",
    "adafactor",
    "muon",
]


TimmOptimizerName = Annotated[str, Field(pattern=r"^timm:\w+$")]


class ModelConfig(Section):
    name: Text = Field(
        "cnn",
        min_length=1,
        description="Model: cnn, resnet18-small, linear, one of `gputrain models`, or your own code (module:name).",
    )
    source: Literal["auto", "builtin", "torchvision", "timm"] = Field(
        "auto", description="Whose model of that name: builtin, torchvision, timm, or the first of them to have it."
    )
    options: Options = Field(
        {},
        description="Further arguments of the model, such as {dropout: 0.2}, as its maker names them.",
    )
    weights: Text | None = Field(
        None,
        description="Weights to begin with: pretrained (the library's own), or a file (a state dict, a checkpoint of "
        "gputrain, safetensors); what does not fit is left out and listed.",
    )
    freeze: Annotated[Literal["none", "backbone"] | tuple[str, ...], BeforeValidator(_as_name_prefixes)] = Field(
        "none",
        description="What does not train: none, backbone (all but the classifier), or beginnings of names such as "
        "[conv1, layer1].",
    )
    sync_bn: bool = Field(False, description="BatchNorm over the images of all ranks (SyncBatchNorm; GPUs only).")
    ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Decay of a running average of the weights, evaluated and saved beside them, such as 0.999; 0 for "
        "none.",
    )
    channels_last: Literal["auto", "on", "off"] = Field(
        "auto", description="Keep the channels of each pixel together in memory: on, off, or where it is faster (auto)."
    )
    compile: bool = Field(False, description="Compile the model (torch.compile): a slower start, faster steps.")
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(
        "default", description="How model.compile compiles; reduce-overhead replays CUDA graphs."
    )
    init: Literal["default", "normal"] = Field(
        "default", description="Starting weights: the library's own, or normal with deviation model.init_std."
    )
    init_std: float = Field(0.02, gt=0, description="Standard deviation of the weights for model.init normal.")


class LossConfig(Section):
    name: Literal["cross_entropy", "mse", "bce"] | UserCodePath = Field(
        "cross_entropy",
        description="Loss: cross_entropy, mse or bce (squared error and binary cross-entropy on one-hot labels), or "
        "your own code (module:name).",
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Share of each label that is spread over all classes.")
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="Weigh the classes alike (none), or each by how rare it is in the training data (balanced)."
    )


class OptimConfig(Section):
    name: OptimizerName | TimmOptimizerName = Field(
        "sgd",
        description="Optimizer: one of torch's (muon trains matrices, and adamw the rest), or of timm's as timm:NAME.",
    )
    lr: float = Field(0.05, gt=0, le=1e6, description="Highest learning rate of the schedule, before optim.lr_scaling.")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="Multiply the learning rate by the number of ranks (with dp of GPUs), its root, or not at all.",
    )
    momentum: float | None = Field(
        None, ge=0, lt=1, description="Momentum; when left out 0.9 for sgd, and what the others have of themselves."
    )
    nesterov: bool | None = Field(
        None, description="Nesterov's form of the momentum; when left out off for sgd, on for muon."
    )
    betas: FloatPair | None = Field(
        None, description="Decay rates of the running averages; the optimizer's own when left out."
    )
    eps: float | None = Field(
        None, gt=0, description="Term added to the denominator; the optimizer's own when left out."
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Weight decay: decoupled for adamw, adafactor and muon, an L2 penalty for torch's others.",
    )
    decay_norms: bool = Field(
        True,
        description="Weight decay also on biases, the weights of normalisation, and what else the model itself would "
        "leave out.",
    )
    options: Options = Field({}, description="Further parameters of the optimizer, such as {alpha: 0.9} for rmsprop.")
    layer_lr: Factors = Field(
        {},
        description="Factors on the learning rate for parts of the model, by the beginning of their names, such as "
        "{layer4: 0.1, fc: 1.0}; the longest that fits holds, and 1 for all else.",
    )
    layer_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Factor on the learning rate from each layer to the one before it, beside optim.layer_lr; 1 for "
        "none.",
    )
    accumulate: int = Field(1, ge=1, le=10**6, description="Batches of a rank whose gradients make one step.")
    clip_norm: float = Field(0.0, ge=0, description="Greatest norm of the gradient, cut down to it; 0 for no limit.")
    clip_norm_type: Annotated[float, Field(gt=0)] | Literal["inf"] = Field(
        2.0, description="Which norm optim.clip_norm takes, such as 2, or inf for the greatest entry."
    )
    clip_value: float = Field(0.0, ge=0, description="Greatest entry of the gradient, cut down to it; 0 for no limit.")
    nonfinite: Literal["halt", "skip"] = Field(
        "halt",
        description="A step whose loss or gradient is NaN or infinite on any rank: halt the run, or skip the step.",
    )
    nonfinite_limit: int = Field(
        10, ge=1, description="Steps in a row that optim.nonfinite skip leaves out before the run fails after all."
    )


class ScheduleConfig(Section):
    name: Literal[
        "constant",
        "step",
        "multistep",
        "exponential",
        "cosine",
        "restarts",
        "polynomial",
        "linear",
        "onecycle",
        "plateau",
    ] = Field("constant", description="How the learning rate goes on after the warm-up.")
    by: Literal["auto", "step", "epoch"] = Field(
        "auto",
        description="Change the learning rate at every step or at the end of each epoch, which is also what the "
        "schedule's numbers count; auto is epochs for step, multistep, exponential, restarts and plateau, else steps.",
    )
    warmup_epochs: float = Field(
        0.0, ge=0, description="Epochs in which the learning rate grows linearly from nothing."
    )
    warmup_steps: int = Field(0, ge=0, le=10**9, description="The same in steps; give one of the two.")
    step_size: int = Field(10, ge=1, description="Epochs (or steps, see schedule.by) between falls of schedule step.")
    milestones: Annotated[tuple[int, ...], Strict(False)] = Field(
        (), description="Epochs (or steps) after which schedule multistep falls."
    )
    gamma: float = Field(
        0.1, gt=0, le=1, description="Factor of each fall of schedules step, multistep, exponential and plateau."
    )
    final_lr_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Learning rate at the end of schedules cosine, restarts, polynomial and linear, and the least of "
        "plateau, as a share of the highest.",
    )
    restart_every: int = Field(10, ge=1, description="Epochs (or steps) of the first cycle of schedule restarts.")
    restart_factor: int = Field(1, ge=1, description="How many times longer each cycle of restarts is than the last.")
    power: float = Field(1.0, gt=0, description="Exponent of schedule polynomial.")
    peak_at: float = Field(0.3, gt=0, lt=1, description="Share of the run in which onecycle grows to its highest.")
    start_factor: float = Field(25.0, ge=1, description="The highest learning rate by onecycle's first.")
    end_factor: float = Field(1e4, ge=1, description="The first learning rate of onecycle by its last.")
    patience: int = Field(
        3, ge=0, description="Epochs without a better validation loss that plateau lets pass before it falls."
    )
    threshold: float = Field(1e-4, ge=0, description="Share by which a validation loss must be lower to be better.")
    cooldown: int = Field(0, ge=0, description="Epochs after a fall of plateau that do not count.")


class PrecisionConfig(Section):
    amp: Literal["off", "fp16", "bf16", "O0", "O1", "O2", "O3"] = Field(
        "off",
        description="Precision: off or O0 (float32), bf16 (autocast), fp16 or O1 (autocast and a gradient scaler), O2 "
        "(half model, float32 BatchNorm and master weights), O3 (all half).",
    )
    tf32: Literal["auto", "on", "off"] = Field(
        "auto", description="TF32 for float32 products on GPUs: on, off, or as torch has it (auto: convolutions only)."
    )
