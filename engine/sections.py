"""The sections of a config, each key with its type, its limits, its default and its description."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict


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


def _or_empty(value: object) -> object:
    """Names of parts of a model can be numbers to YAML."""
    if isinstance(value, dict):
        return {_as_text(key): part for key, part in value.items()}
    return {} if value is None else value


def _as_names(value: object) -> object:
    """`layer1,layer2` and `[layer1, layer2]` both name parts of a model."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = [value]
    if isinstance(value, str) and value not in ("none", "backbone"):
        value = [part.strip() for part in value.strip("[] ").split(",") if part.strip()]
    return tuple(map(_as_text, value)) if isinstance(value, list) else value


Text = Annotated[str, BeforeValidator(_as_text)]
Selection = Annotated[str, BeforeValidator(_as_selection)]
Floats = Annotated[tuple[float, ...], Strict(False)]
Pair = Annotated[tuple[float, float], Strict(False)]
# Left empty, as a key in YAML or a field in the form can be, they are so.
Options = Annotated[dict[str, Any], BeforeValidator(_or_empty)]
Factors = Annotated[dict[str, float], BeforeValidator(_or_empty)]
# Code of the user's own: a module, and what is called in it.
OWN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
Own = Annotated[str, Field(pattern=OWN)]
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

IMAGE_FILE_DATASETS = ("mnist", "fashion-mnist", "cifar10", "cifar100")
DatasetName = Literal["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "folder", "fake"]

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
TimmName = Annotated[str, Field(pattern=r"^timm:\w+$")]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Run(Section):
    name: Annotated[Text, Field(pattern=NAME, max_length=100)] | None = Field(
        None, description="Name of the run and of its folder; made from the config's name and a number when left out."
    )
    epochs: int = Field(10, ge=1, le=10**9, description="Times that training goes through the data.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the split, the order, the augmentation and the model.")
    resume: bool = Field(False, description="Continue the run of this name from its last checkpoint, if it exists.")
    code: Text | None = Field(
        None,
        description="Folder that code of your own (module:name) is imported from; where gputrain is started when left "
        "out.",
    )
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
    parallel: Literal["ddp", "dp"] = Field(
        "ddp",
        description="One process for each GPU (ddp), or torch's DataParallel in one process for all of them (dp), for "
        "comparison.",
    )
    backend: Literal["auto", "nccl", "gloo"] = Field(
        "auto", description="How ranks exchange gradients: nccl, gloo, or what suits the devices (auto)."
    )
    init_method: Text = Field(
        "auto",
        min_length=1,
        description="How ranks find each other: auto, env://, tcp://HOST:PORT or file:///PATH.",
    )
    bucket_view: bool = Field(
        True, description="Let gradients be views into the buckets that ddp sends, which saves a copy of them."
    )
    static_graph: bool = Field(
        False, description="Tell ddp that every step uses the same parameters in the same order, which saves it work."
    )
    empty_cache: bool = Field(False, description="Give cached GPU memory back to the driver after each evaluation.")


class Data(Section):
    dataset: DatasetName | Own = Field(
        "digits",
        description="Digits (shipped), mnist, fashion-mnist, cifar10, cifar100, a folder of images, fake ones, or your "
        "own code (module:name): called with the text train and then val, it gives a dataset of (image, label) pairs.",
    )
    path: Text | None = Field(None, description="Folder that the data lies in; digits and fake need none.")
    download: bool = Field(False, description="Fetch a missing torchvision dataset into data.path.")
    batch_size: Annotated[int, Field(ge=1, le=10**9)] | Literal["auto"] = Field(
        64,
        description="Images that a rank takes at once, or each GPU with device.parallel dp; auto is the most that fit.",
    )
    drop_last: bool = Field(True, description="Leave out the last, partial batch of a training epoch.")
    pipeline: Literal["auto", "memory", "stream", "fixed"] = Field(
        "auto",
        description="How images reach the model: decoded once and held in memory, the GPU's own where they fit "
        "(memory), read by loader processes again in each epoch (stream), memory where it fits and is faster (auto), "
        "or one batch again and again (fixed), which shows how fast the rest of the machine is.",
    )
    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="Loader processes a rank in the stream pipeline; auto finds out how many it takes.",
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
        "fail",
        description="An image that can no longer be read while training: fail, or skip it and count it. What is broken "
        "at the start is left out, and named.",
    )
    fake_train: int = Field(1024, ge=1, le=10**9, description="Training images that fake makes.")
    fake_val: int = Field(256, ge=1, le=10**9, description="Validation images that fake makes.")

    @property
    def batch(self) -> int:
        """`batch_size` as a number; what `auto` begins with, until the most that fit is known."""
        return 64 if self.batch_size == "auto" else self.batch_size


class Augment(Section):
    crop_padding: int = Field(0, ge=0, description="Pixels of border for random crops in training; 0 for no crop.")
    resized_crop: bool = Field(
        False, description="Cut a part of random size and shape out of each training image, and bring it to its size."
    )
    crop_scale: Pair = Field((0.08, 1.0), description="Least and greatest area of resized_crop, as shares.")
    crop_ratio: Pair = Field((0.75, 4 / 3), description="Least and greatest width by height of resized_crop.")
    flip: bool = Field(False, description="Mirror training images left to right, each with probability one half.")
    brightness: float = Field(0.0, ge=0, le=10, description="Colour jitter: change the brightness by up to this share.")
    contrast: float = Field(0.0, ge=0, le=10, description="Colour jitter: change the contrast by up to this share.")
    saturation: float = Field(
        0.0,
        ge=0,
        le=10,
        description="Colour jitter: change the saturation by up to this share; grey images have none.",
    )
    hue: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="Colour jitter: turn the hue by up to this share of the circle; grey images have none.",
    )
    policy: Literal["none", "randaugment", "trivialaugment"] = Field(
        "none", description="Random distortions of training images: none, randaugment or trivialaugment."
    )
    policy_ops: int = Field(2, ge=1, le=14, description="Distortions that randaugment makes of each image.")
    policy_magnitude: int = Field(9, ge=0, le=30, description="Strength of randaugment's distortions, 0 to 30.")
    erasing: float = Field(
        0.0, ge=0, le=1, description="Probability that a random rectangle of an image is set to the mean colour."
    )
    mixup: float = Field(
        0.0, ge=0, le=1000, description="Alpha of mixup, which blends pairs of images and their labels; 0 for none."
    )
    cutmix: float = Field(
        0.0, ge=0, le=1000, description="Alpha of cutmix, which cuts a part of one image into another; 0 for none."
    )
    transform: Own | None = Field(
        None,
        description="Your own transform (module:name), called with each training image as a C x H x W tensor of uint8, "
        "which gives one of the same form.",
    )


class Model(Section):
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
    freeze: Annotated[Literal["none", "backbone"] | tuple[str, ...], BeforeValidator(_as_names)] = Field(
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


class Loss(Section):
    name: Literal["cross_entropy", "mse", "bce"] | Own = Field(
        "cross_entropy",
        description="Loss: cross_entropy, mse or bce (squared error and binary cross-entropy on one-hot labels), or "
        "your own code (module:name).",
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Share of each label that is spread over all classes.")
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="Weigh the classes alike (none), or each by how rare it is in the training data (balanced)."
    )


class Optim(Section):
    name: OptimizerName | TimmName = Field(
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
    betas: Pair | None = Field(
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


class Schedule(Section):
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


class Precision(Section):
    amp: Literal["off", "fp16", "bf16", "O0", "O1", "O2", "O3"] = Field(
        "off",
        description="Precision: off or O0 (float32), bf16 (autocast), fp16 or O1 (autocast and a gradient scaler), O2 "
        "(half model, float32 BatchNorm and master weights), O3 (all half).",
    )
    tf32: Literal["auto", "on", "off"] = Field(
        "auto", description="TF32 for float32 products on GPUs: on, off, or as torch has it (auto: convolutions only)."
    )


class Checkpoint(Section):
    keep: int = Field(3, ge=1, description="Newest checkpoints kept beside the best.")
    every_epochs: int = Field(
        1, ge=1, description="Epochs between two checkpoints; the best so far and the last are saved as well."
    )
    every_steps: int = Field(0, ge=0, le=10**9, description="Steps between two checkpoints; 0 for none by steps.")
    every_minutes: float = Field(10.0, ge=0, description="Minutes between two checkpoints; 0 for none by the clock.")
