"""Loading of trained models from checkpoints: weights, classes and input format.

A checkpoint is data: anybody can write one that names any code, or any number of DataLoader workers. So its user code
is used only if the config of the user's own run names it too (`limit_to_run`). Called by `predict`, `evaluate` and
`export`, and by their commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from engine.base.codec import convert
from engine.base.errors import UsageError
from engine.base.trust import describe_user, foreign_reason
from engine.config.code_trust import CodeTrust
from engine.config.loader import ConfigError, resolve_config, validate_config
from engine.config.schema import Config, sections, without_unstored
from engine.config.settings import read_settings
from engine.config.user_code import is_user_code, user_code_names
from engine.runs.checkpoint_files import DamagedCheckpointError, find_checkpoint
from engine.runs.events import EpochEvent
from engine.runs.folder import RunFolder
from engine.runs.history import History
from engine.train.data.augment.batch_ops import channel_stats, convert_to_format, normalize
from engine.train.data.sources.base import ImageFormat
from engine.train.loop.checkpoint import check_content, load_checkpoint
from engine.train.loop.tasks.base import Task
from engine.train.loop.tasks.table import build_task
from engine.train.models.factory import build_model
from engine.train.models.precision import device_capability, resolve_memory_format, set_tf32
from engine.train.models.tta import augmented_logits

# Keys of data that a checkpoint could set to fill the memory or to start any number of processes.
LOADING_KEYS = ("batch_size", "workers", "worker_type", "prefetch", "on_bad", "fake_train", "fake_val")
# A difference can list the names of all parameters.
MAX_DIFFERENCE_CHARS = 200


@dataclass(frozen=True)
class TrainedCheckpoint:
    """The parts of a checkpoint that inference needs. `weights` are the EMA weights if `ema` is True.

    `code_trust` says which user code of the config may run, and `task_state` is that of `Task.state`.
    """

    path: Path
    config: Config
    classes: tuple[str, ...]
    image_format: ImageFormat
    weights: dict[str, Tensor]
    ema: bool
    step: int
    task_state: Mapping[str, Sequence[float]] = field(default_factory=dict)
    code_trust: CodeTrust = field(default_factory=CodeTrust)


@dataclass(frozen=True)
class TrainedModel:
    """The model of a checkpoint in float32 and evaluation mode, on a device."""

    checkpoint: TrainedCheckpoint
    model: nn.Module
    device: torch.device
    task: Task

    @torch.inference_mode()
    def logits(self, images: Tensor) -> Tensor:
        """Return logits of shape (N, classes) in float32 on the model's device, averaged over the views of `eval.tta`.

        `images` are uint8 of shape (N, C, H, W), as `read_image` returns them, or float32 of a user dataset. Square
        uint8 images of another size are resized and cropped here.
        """
        return augmented_logits(self.model, self.prepare(images), self.checkpoint.config.eval).float()

    def prepare(self, images: Tensor) -> Tensor:
        """Return the model's input on its device: `images` of `logits`, resized and normalized."""
        image_format = self.checkpoint.image_format
        if images.shape[1:] != (image_format.channels, image_format.val_size, image_format.val_size):
            images = convert_to_format(images, image_format)
        # Channels-last only where training has it: the user's model may not accept it.
        memory_format = resolve_memory_format(self.checkpoint.config, self.model, self.device)
        images = images.to(self.device, memory_format=memory_format)
        return normalize(images, *channel_stats(image_format, self.device))

    def probabilities(self, images: Tensor) -> Tensor:
        """Return probabilities or other predictions of shape (N, classes) on the model's device, see
        `Task.activate`."""
        return self.task.activate(self.logits(images))


def load_trained_model(
    folder: RunFolder,
    which: str = "best",
    *,
    device: str = "auto",
    raw: bool = False,
    code_trust: CodeTrust | None = None,
) -> TrainedModel:
    """Load a model from a run folder. See `read_trained_checkpoint` and `resolve_device` for the arguments.

    Raises UsageError.
    """
    return build_trained_model(read_trained_checkpoint(folder, which, raw=raw, code_trust=code_trust), device)


def read_trained_checkpoint(
    folder: RunFolder, which: str = "best", *, raw: bool = False, code_trust: CodeTrust | None = None
) -> TrainedCheckpoint:
    """Read a checkpoint of a run.

    `which` is that of `find_checkpoint`. `raw` selects the model weights even if there are EMA weights. `code_trust` is
    what the user grants. Starts no thread and does not initialize CUDA, so the caller can still fork. Raises UsageError
    if the checkpoint is missing or damaged.
    """
    path = find_checkpoint(folder, which)
    try:
        state = load_checkpoint(path)
        check_content(state)
    except DamagedCheckpointError as error:
        raise UsageError.one(
            str(path),
            f"{error}; select another with --checkpoint last, or --checkpoint FILE",
            code="damaged",
        ) from error
    config, foreign = limit_to_run(config_from_checkpoint(state["config"]), path, folder)
    ema = state["ema"] is not None and not raw
    return TrainedCheckpoint(
        path=path,
        config=config,
        classes=tuple(state["classes"]),
        image_format=convert(state["image_format"], ImageFormat),
        weights=state["ema"] if ema else state["model"],
        ema=ema,
        step=state["step"],
        task_state=state.get("task", {}),
        code_trust=replace(code_trust or CodeTrust(), foreign=foreign),
    )


def find_epoch(checkpoint: TrainedCheckpoint, history: History) -> EpochEvent | None:
    """Return the epoch at whose end the checkpoint was saved, None for a checkpoint saved within an epoch."""
    return next((epoch for epoch in history.epochs if epoch.step == checkpoint.step), None)


def check_takes_images(checkpoint: TrainedCheckpoint) -> None:
    """Raise UsageError if the model takes the floating-point tensors of a user dataset instead of images."""
    images = checkpoint.image_format
    if images.is_float:
        shape = " x ".join(map(str, (images.channels, images.size, images.size)))
        raise UsageError.one(
            str(checkpoint.path),
            f"its model takes floating-point tensors ({shape}), not images",
            "only `gputrain evaluate` supports it",
            code="not-supported",
        )


def config_from_checkpoint(values: Mapping[str, Any]) -> Config:
    """Return the config in a checkpoint without keys that this version does not know. Raises UsageError if invalid."""
    known_sections = sections()
    known_values = {
        section: {key: value for key, value in keys.items() if key in known_sections[section].model_fields}
        for section, keys in values.items()
        if section in known_sections
    }
    return validate_config(without_unstored(known_values))


def limit_to_run(config: Config, checkpoint: Path, folder: RunFolder) -> tuple[Config, dict[str, str]]:
    """Limit the config of a checkpoint to what the config of the run in `folder` allows.

    The folder of user code, the arguments of code that the run names too, and how images are loaded come from the run.
    Nothing is downloaded. Also returns why each other key names code that is not the user's, see `CodeTrust.foreign`.
    Raises UsageError if the user's settings cannot be read.
    """
    run_config, foreign_in_run = _run_config(folder)
    foreign_folder = None if (problem := folder.owner_problem()) is None else f"{folder.path} {problem}"
    run_names, foreign = user_code_names(run_config), dict[str, str]()
    for key, names in user_code_names(config).items():
        if run_names.get(key) != names:
            owner, config_file = _owner(checkpoint), folder.config
            foreign[key] = f"{checkpoint}, which {owner}, names it, but {config_file} does not"
        elif (reason := foreign_folder or foreign_in_run.get(key) or foreign_in_run.get("run.code")) is not None:
            foreign[key] = reason
    run = config.run.model_copy(
        update={"code": run_config.run.code, "code_packages": read_settings().run.code_packages}
    )
    loading = {key: getattr(run_config.data, key) for key in LOADING_KEYS}
    model, data = config.model, config.data.model_copy(update={"download": False, **loading})
    if "model.name" in run_names.keys() - foreign.keys():
        model = model.model_copy(update={"options": run_config.model.options})
    if "data.dataset" in run_names.keys() - foreign.keys():
        data = data.model_copy(update={"path": run_config.data.path})
    return config.model_copy(update={"run": run, "model": model, "data": data}), foreign


def _run_config(folder: RunFolder) -> tuple[Config, dict[str, str]]:
    """Return the config of a run, without what is invalid, and why some of its code is not the user's."""
    try:
        resolved = resolve_config(str(folder.config), trust_code=True)
    except ConfigError as error:
        return error.valid_part, {}
    except UsageError:
        return Config(), {}
    return resolved.config, dict(resolved.foreign_code)


def _owner(path: Path) -> str:
    try:
        status = path.stat()
    except OSError as error:
        return f"cannot be examined: {error.strerror}"
    return foreign_reason(status) or f"belongs to {describe_user(status.st_uid)}"


def build_trained_model(checkpoint: TrainedCheckpoint, device: str = "auto") -> TrainedModel:
    """Build the model of a checkpoint on `device`, with its weights. Raises UsageError if they do not match."""
    target, name = resolve_device(device), checkpoint.config.model.name
    set_tf32(checkpoint.config.precision, target, device_capability(target))
    try:
        if not is_user_code(name):
            # First without memory: the config of somebody else's checkpoint can name a model of any size.
            # A constructor that reads values of tensors fails there.
            with suppress(NotImplementedError):
                with torch.device("meta"):
                    shapes = build_architecture(checkpoint)
                shapes.load_state_dict(checkpoint.weights, assign=True)
        model = build_architecture(checkpoint)
        model.load_state_dict(checkpoint.weights)
    except RuntimeError as error:
        # The message of `load_state_dict` has a line for each difference below its title.
        title, _, differences = str(error).partition("\n")
        first = shorten(differences.partition("\n")[0].strip() or title, MAX_DIFFERENCE_CHARS, placeholder=" ...")
        raise UsageError.one(
            str(checkpoint.path),
            f"the checkpoint does not match {name}: {first.rstrip('. ')}",
            "use it in the folder of the run that wrote it",
            code="conflict",
        ) from error
    task = build_task(checkpoint.config, checkpoint.classes, target, state=checkpoint.task_state)
    return TrainedModel(checkpoint, model.float().eval().requires_grad_(False).to(target), target, task)


def build_architecture(checkpoint: TrainedCheckpoint) -> nn.Module:
    """Build the architecture of a checkpoint without its weights. Pretrained weights are not downloaded again.

    Raises UsageError if its config names code of somebody else."""
    checkpoint.code_trust.check(checkpoint.config, ("model.name",))
    config = checkpoint.config.model_copy(
        update={"model": checkpoint.config.model.model_copy(update={"weights": None})}
    )
    return build_model(config, checkpoint.image_format.channels, len(checkpoint.classes), checkpoint.image_format.size)


def resolve_device(name: str) -> torch.device:
    """Return the device of "auto", "cpu" or a name of torch; "auto" is the first GPU if it works, else the CPU.

    Raises UsageError if the device does not work.
    """
    if name == "auto":
        gpu = torch.device("cuda", 0)
        return gpu if torch.cuda.is_available() and _device_fault(gpu) is None else torch.device("cpu")
    device = torch.device(name)
    if (fault := _device_fault(device)) is not None:
        raise UsageError.one("--gpus", f"the GPU cannot be used: {fault}; use auto or cpu", code="no-gpu")
    return device


def _device_fault(device: torch.device) -> str | None:
    """Return why a computation on the device fails, None if it succeeds."""
    try:
        torch.zeros(1, device=device).add(1).cpu()
    except (RuntimeError, AssertionError) as error:
        # A CPU-only build of torch raises AssertionError for CUDA devices.
        return str(error).partition("\n")[0]
    return None
