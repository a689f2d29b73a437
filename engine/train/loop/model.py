"""The model of one rank, and all that changes it: EMA weights, gradient scaler, optimizer and learning rate.

`trainer` builds a `Model`, `loop` trains it. `engine.train.models` has the networks, `engine.train.optim` optimizers
and schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_
from torch.optim.lr_scheduler import ReduceLROnPlateau

from engine.base.errors import Problem, UsageError, collect_problems, raise_if_any
from engine.config.tasks import Mode
from engine.config.training_sections import ScheduleConfig
from engine.config.user_code import is_user_code
from engine.runs.metrics import Better
from engine.runs.monitor import config_monitor
from engine.train.data.sources.base import ImageFormat
from engine.train.distributed.collectives import broadcast_tensors
from engine.train.loop.job import Job
from engine.train.loop.tasks.base import Task
from engine.train.models.compile import compile_in_place, eager_for_partial_batch
from engine.train.models.factory import build_model, check_model
from engine.train.models.freeze import convert_to_sync_batch_norm, freeze, nothing_to_synchronize, set_train_mode
from engine.train.models.grad_checkpointing import checkpoint_gradients
from engine.train.models.precision import (
    apply_half_precision,
    autocast,
    build_grad_scaler,
    input_dtype,
    master_params_to_model_params,
    model_grads_to_master_grads,
    resolve_memory_format,
    tf32_is_on,
)
from engine.train.models.transfer import load_weights
from engine.train.optim.lr_schedule import lr_factor, lr_scaling_factor, scaled_lr
from engine.train.optim.optimizers import build_optimizer, optimizer_step, set_lr
from engine.train.optim.user_schedule import load_user_schedule

# Only the progress is saved; settings such as patience come from the current config.
_SCHEDULER_STATE_KEYS = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class ModelEma:
    """Hold `network`, whose weights are the exponential moving average of another network's weights in float32.

    The decay is `min(decay, (1 + step) / (10 + step))`, so that the initial weights are forgotten quickly (TensorFlow's
    ExponentialMovingAverage).
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.network = deepcopy(network).eval().requires_grad_(False)
        self._decay = decay

    def update(self, network: nn.Module, step: int) -> None:
        """Update after training step `step`, counted from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        fresh = [parameter.detach().float() for parameter in network.parameters()]
        torch._foreach_lerp_([parameter.data for parameter in self.network.parameters()], fresh, 1 - decay)

    def copy_buffers(self, network: nn.Module) -> None:
        """Copy the buffers unchanged: BatchNorm's running statistics are averages already."""
        for mine, theirs in zip(self.network.buffers(), network.buffers(), strict=True):
            mine.copy_(theirs)


class PlateauFactor:
    """torch's ReduceLROnPlateau applied to a learning rate of 1, which gives a factor on the actual learning rate.

    For other schedules the factor is always 1. `mode` says whether the minimum or the maximum of its metric is best.
    """

    def __init__(self, schedule: ScheduleConfig, mode: Mode = "min") -> None:
        self._factor_optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self._scheduler = None
        if schedule.name == "plateau":
            self._scheduler = ReduceLROnPlateau(
                self._factor_optimizer,
                mode,
                factor=schedule.gamma,
                patience=schedule.patience,
                threshold=schedule.threshold,
                cooldown=schedule.cooldown,
                min_lr=schedule.final_lr_ratio,
            )

    @property
    def factor(self) -> float:
        """Current factor on the learning rate, from 1 down to `schedule.final_lr_ratio`."""
        return float(self._factor_optimizer.param_groups[0]["lr"])

    def step(self, value: float | None) -> None:
        """Update the factor at the end of an epoch; all ranks must pass the same value. None counts as no
        improvement."""
        if self._scheduler is not None:
            self._scheduler.step(math.nan if value is None else value)

    def state_dict(self) -> dict[str, Any]:
        if self._scheduler is None:
            return {}
        return {"factor": self.factor, **{key: getattr(self._scheduler, key) for key in _SCHEDULER_STATE_KEYS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, unless it or this instance belongs to a schedule other than plateau."""
        if self._scheduler is None or not state:
            return
        self._factor_optimizer.param_groups[0]["lr"] = state["factor"]
        for key in _SCHEDULER_STATE_KEYS:
            setattr(self._scheduler, key, state[key])


class Model:
    """The network of one rank, its task with the losses, and its optimizer.

    `network` computes. `master` holds the trained float32 weights for precision O2, else None. `frozen` are the layers
    that stay in evaluation mode. `parallel` is the network wrapped in DistributedDataParallel or DataParallel, once the
    ranks are connected. `notes` go to the log.
    """

    def __init__(
        self,
        job: Job,
        image_format: ImageFormat,
        task: Task,
        num_devices: int,
        lr_of_step: Callable[[int], float],
        checkpoint: Mapping[str, Any] | None = None,
    ) -> None:
        """Build network, loss and optimizer, with the weights of a checkpoint to resume from. Raises UsageError with
        the problems of all three."""
        config, device, problems = job.config, task.device, list[Problem]()
        self.config, self.device, self.notes, self._lr_of_step = config, device, list[Problem](), lr_of_step
        with collect_problems(problems):
            self.task, self.criterion = task, task.loss
        with collect_problems(problems):
            self._build_network(image_format, task.classes, problems, checkpoint)
            self.optimizer = build_optimizer(config.optim, self.optimized, num_devices, config.run, self.notes)
        raise_if_any(problems)
        self.parallel = self.network
        self.validation_loss = task.validation_loss
        self.scaler = build_grad_scaler(config.precision, device)
        watches_loss = config.run.monitor == "auto" or config_monitor(config).better is Better.LOW
        self.plateau = PlateauFactor(config.schedule, "min" if watches_loss else "max")
        self.skips_nonfinite = config.optim.nonfinite == "skip"
        self.input_dtype, self.uses_tf32 = input_dtype(config.precision), tf32_is_on(device)
        self._full_batch_size = config.data.numeric_batch_size * job.plan.devices_per_rank
        # Cached: iterating over all modules in every step is slow.
        self._parameters = list(self.network.parameters())

    def _build_network(
        self,
        image_format: ImageFormat,
        classes: Sequence[str],
        problems: list[Problem],
        checkpoint: Mapping[str, Any] | None,
    ) -> None:
        """Build architecture, initial weights, frozen parts, memory format and precision, in this order.

        Problems with weights and frozen parts are appended to `problems`. Raises UsageError if there is no network.
        """
        config, device = self.config, self.device
        network = build_model(config, image_format.channels, len(classes), image_format.size)
        sizes = {
            image_format.val_size: "data.val_crop",
            **dict.fromkeys(image_format.train_sizes, "data.size_schedule"),
        }
        for size, key in reversed((sizes | {image_format.size: "data.image_size"}).items()):
            check_model(network, config, image_format, size, len(classes), size_key=key)
        with collect_problems(problems):
            if checkpoint:
                try:
                    network.load_state_dict(checkpoint["model"])
                except RuntimeError as error:
                    reason = f"the checkpoint does not match {config.model.name}: {error}; resume with its config"
                    raise UsageError.one("model.name", reason, code="conflict") from error
            elif (loaded := load_weights(network, config, image_format.size, classes)) is not None:
                self.notes.append(Problem("", loaded.describe(), code="weights-loaded"))
        self.frozen: list[nn.Module] = []
        with collect_problems(problems):
            self.frozen = freeze(network, config.model)
        with collect_problems(problems):
            # The preflight warns that it has no effect on the CPU and with DataParallel.
            if config.model.sync_bn and device.type != "cpu" and config.device.parallel == "ddp":
                if reason := nothing_to_synchronize(network, self.frozen):
                    self.notes.append(Problem("", f"model.sync_bn=true has no effect {reason}", code="no-effect"))
                network = convert_to_sync_batch_norm(network, self.frozen)
        if config.model.grad_checkpointing:
            with collect_problems(problems):
                checkpoint_gradients(network, config.model.name)
        self.memory_format = resolve_memory_format(config, network, device)
        network.to(device)
        if self.memory_format is torch.channels_last:
            # Converts the 4-dimensional weights; the parameters stay the same objects.
            network.to(memory_format=self.memory_format)
        self.ema: ModelEma | None = None
        self.master: nn.Module | None = None
        try:
            self.ema = ModelEma(network, config.model.ema) if config.model.ema else None
            self.master = apply_half_precision(network, config.precision)
        except RuntimeError as error:
            # deepcopy fails on non-leaf tensors, which torch's old weight_norm keeps.
            key = "model.ema" if config.model.ema else "precision.amp"
            reason = f"requires a copy of the model, and {config.model.name} cannot be copied: {error}"
            problems.append(Problem(key, reason, code="not-supported"))
        compile_in_place(network, config)
        self.network = network

    @property
    def optimized(self) -> nn.Module:
        """The network whose parameters the optimizer has."""
        return self.master or self.network

    def train(self) -> None:
        """Set the training mode of the network; frozen layers stay in evaluation mode."""
        set_train_mode(self.network, self.frozen)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the network and its loss compute."""
        return autocast(self.config.precision, self.device)

    def compute_logits(
        self, network: Callable[[Tensor], Tensor], images: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Run `network`, wrapped or not, on images of a type, by default that of this model. Call within `autocast`."""
        with eager_for_partial_batch(self.config, len(images), self._full_batch_size):
            logits: Tensor = network(images.to(dtype or self.input_dtype, memory_format=self.memory_format))
        return logits

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without the all-reduce of DistributedDataParallel."""
        if isinstance(self.parallel, DistributedDataParallel):
            return cast(AbstractContextManager[None], self.parallel.no_sync())
        return nullcontext()

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1 in the data of all epochs.

        It depends on the position in the data, not on the number of steps taken: a run that resumes with another batch
        size keeps its schedule. The factor of schedule `plateau` depends on losses.
        """
        return self._lr_of_step(step) * self.plateau.factor

    def begin_step(self, step: int) -> float:
        """Set the learning rate of a step and reset the gradients; return the learning rate."""
        lr = self.lr_at(step)
        set_lr(self.optimizer, lr)
        self.zero_grad()
        # The forward pass adds non-finite values to BatchNorm's running statistics.
        self._buffers = [buffer.clone() for buffer in self.network.buffers()] if self.skips_nonfinite else []
        return lr

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> tuple[Tensor, Tensor]:
        """Unscale and clip the gradients, and step the optimizer; return the gradient norm before clipping, and whether
        the step was skipped, both on the device.

        A step with a non-finite loss or gradient on any rank is skipped: the all-reduced gradient is identical on every
        rank, so all ranks skip the same step. GradScaler and fused optimizers skip on the device.
        """
        if self.master is not None:
            model_grads_to_master_grads(self.network, self.master)
        grad_norm = self.clip_gradients()
        # `< inf` is also False for NaN, and launches a quarter of the kernels of `isfinite`.
        nonfinite = (grad_norm < math.inf).logical_not_()
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            optimizer_step(self.optimizer, nonfinite, may_skip=self.skips_nonfinite)
        if self.master is not None:
            master_params_to_model_params(self.network, self.master)
        if self._buffers:
            for buffer, saved in zip(self.network.buffers(), self._buffers, strict=True):
                buffer.copy_(torch.where(nonfinite, saved, buffer))
        return grad_norm, nonfinite

    @contextmanager
    def keep_buffers(self) -> Iterator[None]:
        """Keep BatchNorm's running statistics in a backward pass: gradient checkpointing runs the forward pass in it,
        which updates them again."""
        if not self.config.model.grad_checkpointing:
            yield
            return
        buffers = list(self.network.buffers())
        kept = [buffer.clone() for buffer in buffers]
        yield
        for buffer, before in zip(buffers, kept, strict=True):
            buffer.copy_(before)

    def clip_gradients(self) -> Tensor:
        """Clip the gradients as configured; return their total norm before clipping, on the device.

        Without clipping, the gradients stay multiplied by the loss scale.
        """
        optim = self.config.optim
        clips = optim.clip_value > 0 or optim.clip_norm > 0
        if clips:
            self.scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [cast(Tensor, p.grad) for p in parameters]
        norm = norm_to_clip = total_norm(gradients)
        if optim.clip_value > 0:
            clip_grad_value_(parameters, optim.clip_value)
        if optim.clip_norm > 0:
            if optim.clip_value > 0 or optim.clip_norm_type != 2:
                norm_to_clip = total_norm(gradients, float(optim.clip_norm_type))
            clip_grads_with_norm_(parameters, optim.clip_norm, norm_to_clip)
        if self.scaler.is_enabled() and not clips:
            # `scale` multiplies on the device; `get_scale` would be a host sync.
            norm = norm / self.scaler.scale(torch.ones_like(norm))
        return norm

    def update_ema(self, step: int) -> None:
        """Update the EMA weights after training step `step`, counted from 1."""
        if self.ema is not None:
            self.ema.update(self.optimized, step)

    def broadcast_buffers(self) -> None:
        """Copy rank 0's buffers (BatchNorm's running statistics) to all ranks. A collective."""
        broadcast_tensors(self.network.buffers())


def total_norm(gradients: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients together, in float32: in float16 that of finite gradients may overflow.

    Same as `torch.nn.utils.get_total_norm`, but without grouping by type and device, and with one call on the CPU too.
    """
    float_gradients = [grad.float() if grad.dtype == torch.float16 else grad for grad in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(float_gradients, norm_type)), norm_type)
    return norm


def lr_of_step(job: Job, num_devices: int, steps_per_epoch: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step: that of the range test, else of the schedule. Raises
    UsageError if the user's own schedule does not work."""
    config, lr_range = job.config, job.lr_range
    if lr_range is not None:
        scaling = lr_scaling_factor(config.optim, num_devices)
        return lambda step: scaling * lr_range.lr_at(step)
    peak_lr = scaled_lr(config.optim, num_devices)
    schedule, epochs = config.schedule, config.run.epochs
    own = load_user_schedule(config, steps_per_epoch).__getitem__ if is_user_code(schedule.name) else None
    return lambda step: peak_lr * lr_factor(schedule, step, steps_per_epoch, epochs, own)
