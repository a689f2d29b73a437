"""Training steps and evaluation batches never synchronize host and device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.train.data.batch import DeviceBatch
from engine.train.loop.evaluation import evaluate
from engine.train.loop.loop import train_step
from engine.train.loop.metrics import ClassAccumulator, Evaluation
from support.runs.in_process import PremadeBatches, single_rank_trainer


class HostReads(TorchDispatchMode):
    """Count reads of tensor values by the host: `item`, `tolist` and `bool`."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "recipe", [("halt",), ("skip",), ("halt", "model.ema=0.9", "optim.clip_norm=1", "loss.label_smoothing=0.1")]
)
def test_train_step_reads_no_value_from_device(recipe: tuple[str, ...]) -> None:
    nonfinite, *more = recipe
    with single_rank_trainer(f"optim.nonfinite={nonfinite}", *more) as trainer:
        with HostReads() as reads:
            train_step(trainer)
        assert reads.count == 0
        with HostReads() as reads:
            trainer.log.unreported()
            assert trainer.log.train_metrics.counts.tolist()[1] == 32
            assert trainer.log.train_metrics.loss_sum.item() > 0
        assert reads.count > 0, "the mode counts real reads"


@contextmanager
def forbid_host_sync() -> Iterator[None]:
    """Make torch raise on implicit host syncs; explicit ones such as `torch.cuda.synchronize` are allowed."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


HEAVY = ("model.ema=0.9", "optim.clip_norm=1", "optim.clip_value=1", "optim.accumulate=2")
HEAVY += ("augment.mixup=0.2", "augment.cutmix=1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("amp", ["off", "bf16", "fp16", "O2"])
@pytest.mark.parametrize(
    "recipe",
    [(), ("optim.nonfinite=skip", "loss.label_smoothing=0.1", *HEAVY), ("optim.name=adamw", "loss.name=bce")],
)
def test_train_step_between_log_points_does_not_sync_gpu(amp: str, recipe: tuple[str, ...]) -> None:
    with single_rank_trainer(f"precision.amp={amp}", "run.log_every=30", *recipe, on_gpu=True) as trainer:
        assert trainer.device.type == "cuda"
        images, labels = torch.rand(32, 1, 8, 8, device=trainer.device), torch.randint(10, (32,), device=trainer.device)
        micro_batches = trainer.config.optim.accumulate
        trainer.data.batches = PremadeBatches(
            [
                DeviceBatch(images, labels, 1 / micro_batches, index == micro_batches - 1)
                for index in range(micro_batches)
            ]
        )
        for _ in range(3):
            train_step(trainer)
        trainer.log.start_reduction()
        trainer.log.wait_pending()
        with forbid_host_sync():
            for _ in range(20):
                trainer.control.handle_requests()
                train_step(trainer)
        with pytest.raises(RuntimeError), forbid_host_sync():
            trainer.log.train_metrics.loss_sum.item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_evaluate_syncs_gpu_only_at_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with single_rank_trainer("model.ema=0.9", on_gpu=True) as trainer:
        images, labels = torch.rand(32, 1, 8, 8, device=trainer.device), torch.randint(10, (32,), device=trainer.device)
        trainer.data.batches = PremadeBatches([DeviceBatch(images, labels, 1.0)])
        evaluate(trainer)
        all_reduce = ClassAccumulator.all_reduce

        def allow_sync(accumulator: ClassAccumulator) -> Evaluation:
            torch.cuda.set_sync_debug_mode("default")
            return all_reduce(accumulator)

        monkeypatch.setattr(ClassAccumulator, "all_reduce", allow_sync)
        with forbid_host_sync():
            evaluate(trainer)
