"""Config sections `model`, `loss`, `optim`, `schedule`, `precision` and `eval`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict, model_validator

from engine.config.section import (
    Factors,
    FloatPair,
    MetricName,
    ModelName,
    Options,
    Section,
    Text,
    UserCodePath,
    _as_name_prefixes,
    as_list,
)

BUILTIN_MODELS = ("cnn", "linear", "resnet18-small")
_EPOCH_SCHEDULES = {"step", "multistep", "exponential", "restarts", "plateau"}


def by_epoch(schedule: ScheduleConfig) -> bool:
    """Whether the learning rate changes per epoch and the schedule's values count epochs instead of steps."""
    # The user's own schedule is named module:name.
    changes_by_epoch = schedule.name in _EPOCH_SCHEDULES or ":" in schedule.name
    return schedule.by == "epoch" or (schedule.by == "auto" and changes_by_epoch)


def warmup_steps(schedule: ScheduleConfig, steps_per_epoch: int) -> int:
    """Number of warmup steps, from `schedule.warmup_steps` or `schedule.warmup_epochs`; onecycle has its own warmup."""
    if schedule.name == "onecycle":
        return 0
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
TIMM_PREFIX = "timm:"
# Defaults of optim.lr. Those of torch, except for sgd, whose 0.001 is made for no network.
DEFAULT_LRS: Mapping[str, float] = {
    "sgd": 0.05,
    "adam": 1e-3,
    "adamw": 1e-3,
    "nadam": 2e-3,
    "radam": 1e-3,
    "rmsprop": 1e-2,
    "adagrad": 1e-2,
    "adadelta": 1.0,
    "adamax": 2e-3,
    "asgd": 1e-2,
    "rprop": 1e-2,
    "adafactor": 1e-2,
    "muon": 1e-3,
}
# Most of timm's are variants of Adam.
TIMM_LR = 1e-3


def default_lr(optimizer: str) -> float:
    """Return the default of `optim.lr` for an optimizer: that of sgd for the user's own."""
    name, is_timm = optimizer.casefold().removeprefix(TIMM_PREFIX), optimizer.casefold().startswith(TIMM_PREFIX)
    return DEFAULT_LRS.get(name, TIMM_LR if is_timm else DEFAULT_LRS["sgd"])


TimmOptimizerName = Annotated[str, Field(pattern=r"^timm:\w+$")]


class ModelConfig(Section):
    """Section `model`: model, initial weights and compilation."""

    name: ModelName = Field(
        "cnn",
        min_length=1,
        title="model",
        description="Model of `gputrain models`, or your own. cnn, linear and resnet18-small are built in. Your own is "
        "user code (module:name): it is called with those of channels, size and classes that it names and with "
        "model.options, and returns a torch.nn.Module that maps N x C x H x W images to N x classes logits. Example: "
        "engine/OWN_CODE.md.",
    )
    source: Literal["auto", "builtin", "torchvision", "timm"] = Field(
        "auto",
        title="library",
        description="Library of the model: builtin, torchvision, timm or auto. auto uses the first of them that has a "
        "model of that name.",
    )
    options: Options = Field(
        {},
        title="model options",
        description="Extra keyword arguments of the model, such as {dropout: 0.2}.",
    )
    weights: Text | None = Field(
        None,
        description="Initial weights: pretrained (the library's own), or a file. A file is a state dict, a gputrain "
        "checkpoint or safetensors; weights that do not fit are skipped and listed.",
    )
    min_match: float = Field(
        0.5,
        ge=0,
        le=1,
        title="least match",
        description="Least share of the entries of the model that model.weights must fit. A run with fewer is refused.",
    )
    freeze: Annotated[Literal["none", "backbone"] | tuple[str, ...], BeforeValidator(_as_name_prefixes)] = Field(
        "none",
        description="Parameters to freeze: none, backbone or name prefixes. backbone is all but the classifier; "
        "write prefixes as [conv1, layer1].",
    )
    sync_bn: bool = Field(
        False,
        title="SyncBatchNorm",
        description="Synchronize BatchNorm across ranks (SyncBatchNorm). Has no effect on the CPU.",
    )
    ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        title="EMA decay",
        description="Decay of the EMA (averaged) weights, such as 0.999; 0 disables. They are evaluated and saved in "
        "addition to the trained weights, and decide which epoch is the best. Warm-up: after each optimizer step, "
        "counted from 1, the decay is the smaller of this value and (1 + step) / (10 + step), which reaches 0.99 at "
        "step 890 and 0.999 at step 8990.",
    )
    channels_last: Literal["auto", "on", "off"] = Field(
        "auto", description="Memory format channels_last: on, off, or auto (where it is faster)."
    )
    grad_checkpointing: bool = Field(
        False,
        title="gradient checkpointing",
        description="Keep the activations of the borders of blocks alone. The backward pass computes the others again. "
        "This takes less memory and more time; the losses are the same.",
    )
    compile: bool = Field(
        False,
        title="torch.compile",
        description="Compile the model with torch.compile. The first start is slower, the steps are faster.",
    )
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = Field(
        "default", description="Mode of torch.compile. reduce-overhead replays CUDA graphs, one per image size."
    )
    init: Literal["default", "normal"] = Field(
        "default",
        title="initialization",
        description="Initialization: default (the model's own) or normal. normal draws convolution and linear "
        "weights from a normal distribution (model.init_std) and sets their biases to 0.",
    )
    init_std: float = Field(
        0.02, gt=0, title="initial std", description="Standard deviation of the weights with model.init=normal."
    )


class LossConfig(Section):
    """Section `loss`: loss function."""

    name: Literal["auto", "cross_entropy", "mse", "bce", "focal", "asl", "l1", "huber"] | UserCodePath = Field(
        "auto",
        title="loss",
        description="Loss, or your own; auto takes the first one of the task. classification: cross_entropy, mse, bce "
        "(binary cross-entropy), focal; mse and bce are computed on one-hot labels, and all are validated with "
        "cross_entropy. multilabel: bce, asl (asymmetric loss), focal; all are validated with bce. regression: mse, "
        "l1, huber, of numbers scaled to mean 0 and standard deviation 1. Your own is user code (module:name), which "
        "is validated with itself. It is called with logits (N x classes, float32) and the targets: labels (N, int64), "
        "in training with mixup or CutMix class probabilities (N x classes); with the other tasks N x classes, "
        "float32. It returns the mean loss as a scalar tensor. Example: engine/OWN_CODE.md.",
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Label smoothing of the training loss; 0 disables. It is the share of each label that is spread "
        "over all classes. The validation loss has none.",
    )
    class_weights: Literal["none", "balanced"] = Field(
        "none",
        description="Class weights in the training loss: none or balanced. balanced weights each class inversely to "
        "its frequency in the training data; with task multilabel, the images that have a label as much as those "
        "without it (pos_weight).",
    )
    # Below 1, the gradient of an image with a probability of exactly 1 is not finite.
    focal_gamma: float = Field(
        2.0, ge=1, le=100, description="Exponent of focal: the larger, the less images count that are predicted well."
    )
    focal_alpha: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Weight in focal of the images that have a label; those without it have 1 minus this weight. With "
        "task classification, use loss.class_weights.",
    )


class OptimConfig(Section):
    """Section `optim`: optimizer and gradient handling."""

    @model_validator(mode="before")
    @classmethod
    def _fill_lr(cls, values: Any) -> Any:
        """Set `lr` to the default of the optimizer if it is missing or empty."""
        if not isinstance(values, dict) or values.get("lr") is not None:
            return values
        return {**values, "lr": default_lr(str(values.get("name", "sgd")))}

    name: OptimizerName | TimmOptimizerName | UserCodePath = Field(
        "sgd",
        title="optimizer",
        description="Optimizer, such as adamw or timm:lamb. timm:NAME is one of timm, the others are torch's. muon "
        "updates weight matrices; the other parameters use adamw. User code (module:name) is an optimizer class or a "
        "function. It is called with the parameter groups, with those of lr, momentum and so on that it names, and "
        "with optim.options, and returns a torch.optim.Optimizer of all parameters. Example: engine/OWN_CODE.md.",
    )
    lr: float = Field(
        DEFAULT_LRS["sgd"],
        gt=0,
        le=1e6,
        title="learning rate",
        description="Peak learning rate; default: 0.05 for sgd, 0.001 for adamw. optim.lr_scaling multiplies it. "
        "The default of torch's other optimizers is that of torch, of timm's others 0.001, and of your own 0.05; "
        "for task regression, that of sgd is 0.005.",
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none",
        title="LR scaling",
        description="Scale optim.lr by the number of ranks: none, linear or sqrt. With device.parallel=dp, the number "
        "of GPUs counts.",
    )
    momentum: float | None = Field(
        None, ge=0, lt=1, description="Momentum factor. Default: 0.9 for sgd, the optimizer's own otherwise."
    )
    nesterov: bool | None = Field(
        None, title="Nesterov", description="Use Nesterov momentum. Default: off for sgd, on for muon."
    )
    betas: FloatPair | None = Field(
        None, description="Decay rates of the running averages. Default: the optimizer's own."
    )
    eps: float | None = Field(
        None, gt=0, title="epsilon", description="Term added to the denominator. Default: the optimizer's own."
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="Weight decay coefficient. Decoupled for adamw, adafactor and muon; an L2 penalty for torch's "
        "other optimizers.",
    )
    decay_norms: bool = Field(
        True,
        title="decay norms",
        description="Apply weight decay to biases and normalization layers as well. If false, parameters in the "
        "model's own no_weight_decay list are exempt too.",
    )
    weight_decay_groups: Factors = Field(
        {},
        title="decay by group",
        description="Weight decay of some parameters instead of optim.weight_decay. A key is a name prefix, a "
        "pattern such as *pos_embed*, bias for all biases, or norm for all normalization layers. "
        "Example: {norm: 0, bias: 0, fc: 0.01}. The longest matching name applies, then bias, then norm.",
    )
    options: Options = Field(
        {},
        title="optimizer options",
        description="Extra arguments of the optimizer, such as {alpha: 0.9} for rmsprop. Those of muon include "
        "adjust_lr_fn, which scales the learning rate of a matrix of A x B: match_rms_adamw (default) by 0.2 "
        "sqrt(max(A, B)), so that optim.lr suits the parameters of adamw too; original by sqrt(max(1, A / B)); "
        "spectral_unclamped by sqrt(A / B).",
    )
    layer_lr: Factors = Field(
        {},
        title="LR by layer",
        description="Learning rate factors by parameter name prefix. Example: {layer4: 0.1, fc: 1.0}. The longest "
        "matching prefix applies; unmatched parameters use 1.",
    )
    layer_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        title="layer LR decay",
        description="Layer-wise learning rate decay from the head down; 1 disables. Each layer's rate is this "
        "fraction of the next layer's; optim.layer_lr multiplies it.",
    )
    accumulate: int = Field(
        1,
        ge=1,
        le=10**6,
        title="accumulation",
        description="Gradient accumulation: number of micro-batches per optimizer step.",
    )
    clip_norm: float = Field(0.0, ge=0, description="Gradient clipping: maximum norm of the gradient; 0 disables.")
    clip_norm_type: Annotated[float, Field(gt=0)] | Literal["inf"] = Field(
        2.0, description="Norm that optim.clip_norm limits, such as 2, or inf for the maximum."
    )
    clip_value: float = Field(
        0.0, ge=0, description="Gradient clipping: maximum absolute value of an entry; 0 disables."
    )
    nonfinite: Literal["halt", "skip"] = Field(
        "halt",
        title="non-finite step",
        description="On a NaN or infinite loss or gradient: halt the run or skip the step. One affected rank is "
        "enough.",
    )
    nonfinite_limit: int = Field(
        10,
        ge=1,
        title="non-finite limit",
        description="Maximum consecutive steps skipped with optim.nonfinite=skip. The run fails when more are "
        "non-finite.",
    )


class ScheduleConfig(Section):
    """Section `schedule`: LR schedule and warmup."""

    name: (
        Literal[
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
        ]
        | UserCodePath
    ) = Field(
        "constant",
        title="schedule",
        description="LR schedule, such as cosine. It follows the warmup. step, multistep, exponential and plateau "
        "multiply by schedule.gamma; cosine, restarts, polynomial and linear decay to schedule.final_lr_ratio; "
        "onecycle rises, then falls. User code (module:name) is a function as for torch's LambdaLR: it gets the epoch, "
        "from 0, and returns the factor on optim.lr, at least 0. Example: engine/OWN_CODE.md.",
    )
    by: Literal["auto", "step", "epoch"] = Field(
        "auto",
        title="schedule unit",
        description="Unit of the schedule: step, epoch or auto. The learning rate changes, and the schedule's values "
        "count, in this unit; auto is epoch for step, multistep, exponential, restarts, plateau and user "
        "code, else step. By step, user code gets the step, from 0.",
    )
    warmup_epochs: float = Field(0.0, ge=0, description="Epochs of linear warmup from 0 to the peak learning rate.")
    warmup_steps: int = Field(
        0, ge=0, le=10**9, description="Steps of linear warmup, instead of schedule.warmup_epochs."
    )
    step_size: int = Field(
        10, ge=1, title="decay every", description="Epochs (or steps, see schedule.by) between decays of schedule step."
    )
    milestones: Annotated[tuple[int, ...], Strict(False)] = Field(
        (), description="Epochs (or steps) after which multistep decays, such as [30, 60]."
    )
    gamma: float = Field(
        0.1,
        gt=0,
        le=1,
        title="decay factor",
        description="Decay factor of schedules step, multistep, exponential and plateau.",
    )
    final_lr_ratio: float = Field(
        0.0,
        ge=0,
        le=1,
        title="final LR ratio",
        description="Final learning rate as a fraction of the peak. Used by cosine, restarts, polynomial and linear, "
        "and as the minimum of plateau.",
    )
    restart_every: int = Field(10, ge=1, description="Epochs (or steps) of the first cycle of schedule restarts.")
    restart_factor: int = Field(1, ge=1, description="Factor that lengthens each cycle of schedule restarts.")
    power: float = Field(1.0, gt=0, description="Exponent of schedule polynomial.")
    peak_at: float = Field(0.3, gt=0, lt=1, description="Fraction of the run at which onecycle reaches the peak.")
    start_factor: float = Field(25.0, ge=1, description="Ratio of the peak to the initial learning rate of onecycle.")
    end_factor: float = Field(1e4, ge=1, description="Ratio of the initial to the final learning rate of onecycle.")
    patience: int = Field(3, ge=0, description="Epochs without improvement that plateau allows before it decays.")
    threshold: float = Field(
        1e-4,
        ge=0,
        description="Least relative decrease of the validation loss for plateau. plateau counts a smaller one as no "
        "improvement.",
    )
    cooldown: int = Field(0, ge=0, description="Epochs that plateau waits after a decay before it counts again.")


AmpLevel = Literal["off", "fp16", "bf16", "auto", "O0", "O1", "O2", "O3"]


class PrecisionConfig(Section):
    """Section `precision`: mixed precision and TF32."""

    amp: AmpLevel = Field(
        "off",
        title="mixed precision",
        description="Mixed precision: bf16, fp16 or auto. bf16 and fp16 use autocast; auto is bf16 on GPUs of "
        "compute capability 8.0 and higher, else off; a resumed run keeps it. fp16 and O1 add loss "
        "scaling. O0 to O3 are the levels of Apex: O0 is off; O2 is a float16 model with float32 "
        "BatchNorm and master weights; O3 is all float16.",
    )
    tf32: Literal["auto", "on", "off"] = Field(
        "auto",
        title="TF32",
        description="TF32 for float32 matrix products and convolutions on GPUs. auto uses it on GPUs of compute "
        "capability 8.0 and higher, also with device.deterministic: it rounds alike in each run. on and "
        "off set it.",
    )


class EvalConfig(Section):
    """Section `eval`: evaluation of the model."""

    tta: Literal["none", "flip"] = Field(
        "none",
        title="TTA",
        description="Test-time augmentation of evaluation and predictions: none or flip. flip takes the mean of the "
        "logits of each image and its mirror image.",
    )
    metrics: Annotated[tuple[MetricName, ...], BeforeValidator(as_list), Strict(False)] = Field(
        (),
        title="own metrics",
        description="Metrics besides loss and accuracy: macro_f1, macro_precision, macro_recall, balanced_accuracy, or "
        "user code (module:name). User code gets the probabilities (N x classes) and the labels of all validation "
        "images as CPU tensors, and returns a number or a dict of numbers. Example: engine/OWN_CODE.md.",
    )
