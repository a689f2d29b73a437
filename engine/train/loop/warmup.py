"""Warmup steps before training: build DDP's gradient buckets, and check that the model can train.

`trainer` runs the `Warmup`; the state of the model is the same after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.base.codec import UNSET, UnsetType
from engine.base.errors import Problem, UsageError
from engine.base.text import list_names, pluralize
from engine.config.user_code import is_user_code, locate_in_user_code
from engine.config.user_errors import describe_exception
from engine.gpus.peak_flops import peak_tflops
from engine.runs.events import WarningEvent
from engine.train.distributed.failures import has_known_cause
from engine.train.distributed.parallel import warmup_batch_size
from engine.train.loop.data import TrainingData
from engine.train.loop.device import rng_state, set_rng_state
from engine.train.loop.log import TrainingLog
from engine.train.loop.model import Model
from engine.train.models.compile import allow_compilations, compile_usage_error, stop_compile_workers
from engine.train.models.factory import check_logits

MAX_FLOPS_BATCH_SIZE = 2
# CUDA graphs are captured in the second step and replayed from the third on.
COMPILE_WARMUP_STEPS = 3


class Warmup:
    """The warmup of one rank. `cpu_group` is a process group for tensors in host memory."""

    def __init__(self, data: TrainingData, model: Model, log: TrainingLog, cpu_group: dist.ProcessGroup) -> None:
        self._data, self._model, self._log, self._cpu_group = data, model, log, cpu_group
        self._config, self._device, self._images = model.config, model.device, data.image_format

    def run(self) -> tuple[dict[int, float | UnsetType], float | UnsetType]:
        """Run forward and backward passes, compile the model if configured, and restore the model's state.

        Return the floating-point operations of a forward and backward pass of one image by the size of the training
        images, on rank 0, and the peak TFLOPS of all GPUs of the run together. Both are UNSET on the CPU, the
        operations also on other ranks, and the peak also for a GPU that `engine.gpus.peak_flops` does not list.

        DDP rebuilds its gradient buckets after the first backward pass, which changes the order of summation: without
        warmup, the first step of a resumed run would differ from that of an uninterrupted run. Raises UsageError if the
        model cannot train. A collective.
        """
        buffers = {name: buffer.clone() for name, buffer in self._model.network.named_buffers()}
        rng_before = rng_state(self._device)
        self._model.train()
        model = self._config.model
        if model.compile:
            message = f"compiling {model.name} (model.compile_mode {model.compile_mode}), which can take minutes"
            self._log.emit(WarningEvent(message=message, code="compiling"))
        result = self._measure()
        if model.compile:
            self._warm_up_compiled()
            self._model.train()
        self._model.zero_grad()
        with torch.no_grad():
            for name, buffer in self._model.network.named_buffers():
                buffer.copy_(buffers[name])
        set_rng_state(rng_before, self._device)
        return result

    def _measure(self) -> tuple[dict[int, float | UnsetType], float | UnsetType]:
        """Check that the model can train on a small batch, and count its operations on rank 0.

        Raises UsageError. A collective.
        """
        batch_size, sizes = warmup_batch_size(self._data.sampler), self._images.train_sizes
        # cuDNN keeps its choice for a shape, so batches of the size of the training are benchmarked at once.
        with _cudnn_heuristics() if batch_size < self._data.sampler.batch_size else nullcontext():
            self._first_step(batch_size)
            flops: dict[int, float | UnsetType] = dict.fromkeys(sizes, UNSET)
            peak: float | UnsetType = UNSET
            if self._device.type == "cuda":
                # A user's own forward pass may contain collectives.
                if self._data.sampler.rank == 0 or is_user_code(self._config.model.name):
                    flops = {size: self.count_flops(size) for size in sizes}
                peak = self._total_peak_tflops()
        return flops, peak

    def _first_step(self, batch_size: int) -> None:
        """Raise UsageError if the model cannot train on a batch of this size."""
        try:
            self._forward_backward(batch_size)
        except UsageError:
            raise
        except Exception as error:
            if self._config.model.compile and (refusal := compile_usage_error(self._config, error)) is not None:
                raise refusal from error
            problem = None if has_known_cause(error) else self._diagnose_failure(batch_size, error)
            if problem is None:
                raise
            raise UsageError([problem]) from error
        unused = [name for name, p in self._model.network.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            raise UsageError.one(
                "model.name",
                f"{self._config.model.name} does not use {list_names(unused)} in its forward pass, so they get no "
                "gradient; remove them from the model, or freeze them with model.freeze",
                code="unused-weights",
            )

    def _forward_backward(self, batch_size: int, size: int | None = None) -> None:
        logits = self._forward(self._model.parallel, batch_size, size=size)
        # `check_model` has called the model in evaluation mode.
        check_logits(self._config.model.name, logits, batch_size, self._data.num_classes, training=True)
        logits.float().sum().backward()

    def count_flops(self, size: int | None = None) -> float | UnsetType:
        """Return the floating-point operations of one image, forward and backward; UNSET if they cannot be counted.

        `size` is the side of the image, by default that of the largest training images.

        FlopCounterMode counts convolutions, matrix products and attention, two operations per multiply-add; frozen
        parameters need none for their gradients. The second forward pass of gradient checkpointing counts too.
        """
        batch_size = min(warmup_batch_size(self._data.sampler), MAX_FLOPS_BATCH_SIZE)
        trainable = [p for p in self._model.network.parameters() if p.requires_grad]
        synchronized = [module for module in self._model.network.modules() if isinstance(module, nn.SyncBatchNorm)]
        try:
            # Imported here because it imports Triton, which a CPU run does not need.
            from torch.utils.flop_counter import FlopCounterMode

            for module in synchronized:
                # In training mode, SyncBatchNorm is a collective: if one rank fails here, the others would wait for it.
                module.eval()
            with FlopCounterMode(display=False) as counter:
                # `forward` is not compiled; FlopCounterMode cannot count compiled code.
                out = self._forward(self._model.network.forward, batch_size, self._device, size=size)
                # Not `backward`, which would run the hooks of DistributedDataParallel.
                torch.autograd.grad(out.float().sum(), trainable)
            flops: int = counter.get_total_flops()
            return flops / batch_size
        except Exception:
            # Only the MFU depends on it.
            return UNSET
        finally:
            self._model.train()

    def _total_peak_tflops(self) -> float | UnsetType:
        """Return the peak TFLOPS of all GPUs of the run together, UNSET if one is unknown. A collective."""
        first = torch.device(self._device).index or 0
        indices = range(first, first + self._data.sampler.devices_per_rank)
        names, precision = map(torch.cuda.get_device_name, indices), self._config.precision
        peaks = [peak_tflops(name, precision, tf32=self._model.uses_tf32) for name in names]
        total = torch.tensor(sum(math.nan if peak is None else peak for peak in peaks), dtype=torch.float64)
        dist.all_reduce(total, group=self._cpu_group)
        return UNSET if total.isnan() else total.item()

    def _forward(
        self,
        model: Callable[[Tensor], Tensor],
        batch_size: int,
        device: torch.device | None = None,
        *,
        size: int | None = None,
    ) -> Tensor:
        """Run `model` on random images, by default on the device of the batches and of the largest training size."""
        size = size or self._images.size
        shape = (batch_size, self._images.channels, size, size)
        images = torch.rand(shape, device=device or self._data.batch_device)
        with self._model.autocast():
            return self._model.compute_logits(model, images)

    def _warm_up_compiled(self) -> None:
        """Compile for training and for evaluation, with full batches of each image size. Raises UsageError."""
        # Those of the training images from the current epoch on.
        epochs = range(self._data.position.epoch, self._config.run.epochs + 1)
        sizes = dict.fromkeys(self._images.at_epoch(epoch).size for epoch in epochs)
        allow_compilations(len(sizes) + 1)
        try:
            for size in sizes:
                for _ in range(COMPILE_WARMUP_STEPS):
                    self._model.zero_grad()
                    self._forward_backward(self._data.sampler.batch_size, size)
            self._model.network.eval()
            with torch.no_grad():
                for _ in range(COMPILE_WARMUP_STEPS):
                    self._forward(self._model.network, self._data.sampler.batch_size, size=self._images.val_size)
        except Exception as error:
            if (problem := compile_usage_error(self._config, error)) is None:
                raise
            raise problem from error
        stop_compile_workers()

    def _diagnose_failure(self, batch_size: int, error: Exception) -> Problem | None:
        """Return the config problem behind an error of the first warmup step; None for any other error."""
        config, text = self._config, str(error)
        name, images, place = config.model.name, pluralize(batch_size, "image"), locate_in_user_code(error, config)
        fails = f"{name} fails on a batch of {images}"
        if "does not have a deterministic implementation" in text:
            operator = text.partition(" ")[0]
            kind = "GPU" if self._device.type == "cuda" else "CPU"
            reason = f"{name} cannot train deterministically: {operator} has no deterministic kernel on the {kind}"
            advice = "set device.deterministic=false, or use another model.name"
            return Problem("device.deterministic", reason, advice, code="not-supported")
        if "view size is not compatible" in text and self._model.memory_format is torch.channels_last:
            reason = f"{name} does not support channels_last: {text.rstrip('.')}"
            return Problem("model.channels_last", reason, "set model.channels_last=off", code="not-supported")
        if "more than 1 value per channel" in text:
            reason = f"{name} cannot train on the smallest batch of an epoch, {images} per rank"
            reason += f": {text.strip().splitlines()[-1]}"
            return Problem("data.batch_size", reason, "change it, or set data.drop_last=true", code="too-small")
        if place:
            # User code can raise anything.
            reason = describe_exception(error, config.run.code, config.run.code_packages)
            return Problem("model.name", f"{fails}: {reason}", code="user-code-failed")
        return (
            Problem("model.name", f"{fails}: {text}", code="not-supported") if isinstance(error, ValueError) else None
        )


@contextmanager
def _cudnn_heuristics() -> Iterator[None]:
    """Let cuDNN choose its algorithms without a benchmark, which takes seconds and serves one shape only."""
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
