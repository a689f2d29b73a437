"""What a healthy step does not do: ask the device for a value, which on a GPU would be a wait for all that it has
still to compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.data.pipelines.device import DeviceBatch
from engine.training.loop import evaluate, train_step
from engine.training.metrics import Evaluation, EvaluationAccumulator
from in_process import single_rank_trainer


class Asking(TorchDispatchMode):
    """Counts how often a value is asked for: by `item`, `tolist`, `bool`, or a copy to the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "recipe", [("halt",), ("skip",), ("halt", "model.ema=0.9", "optim.clip_norm=1", "loss.label_smoothing=0.1")]
)
def test_train_step_reads_no_value_from_device(recipe: tuple[str, ...]) -> None:
    nonfinite, *more = recipe
    with single_rank_trainer(f"optim.nonfinite={nonfinite}", *more) as fit:
        trainer = fit.state
        with Asking() as asking:
            train_step(trainer)
        assert asking.count == 0
        with Asking() as asking:
            trainer.step_log.unreported()
            assert trainer.train_metrics.counts.tolist()[1] == 32
            assert trainer.train_metrics.loss_sum.item() > 0
        assert asking.count > 0, "it would have been seen"


class Made:
    """Batches that lie on the device already."""

    workers = 0

    def __init__(self, batches: list[DeviceBatch]) -> None:
        self._batches = cycle(batches)

    def __next__(self) -> DeviceBatch:
        return next(self._batches)


@contextmanager
def no_wait() -> Iterator[None]:
    """torch raises where the host would wait for the device, but for the synchronisation that is asked for by name."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


HEAVY = ("model.ema=0.9", "optim.clip_norm=1", "optim.clip_value=1", "optim.accumulate=2", "augment.mixup=0.2")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("amp", ["off", "bf16", "fp16", "O2"])
@pytest.mark.parametrize(
    "recipe",
    [(), ("optim.nonfinite=skip", "loss.label_smoothing=0.1", *HEAVY), ("optim.name=adamw", "loss.name=bce")],
)
def test_train_step_between_log_points_does_not_sync_gpu(amp: str, recipe: tuple[str, ...]) -> None:
    with single_rank_trainer(f"precision.amp={amp}", "run.log_every=30", *recipe, on_gpu=True) as fit:
        t = fit.state
        assert t.device.type == "cuda"
        images, labels = torch.rand(32, 1, 8, 8, device=t.device), torch.randint(10, (32,), device=t.device)
        parts = fit.config.optim.accumulate
        t.batches = Made([DeviceBatch(images, labels, 1 / parts, number == parts - 1) for number in range(parts)])
        for _ in range(3):
            train_step(t)
        t.step_log.start_reduction(t.position.step, 1, 0.1)
        t.step_log.wait_pending()
        with no_wait():
            for _ in range(20):
                fit.handle_requests()
                train_step(t)
        with pytest.raises(RuntimeError), no_wait():
            t.train_metrics.loss_sum.item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_evaluate_syncs_gpu_only_at_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with single_rank_trainer("model.ema=0.9", on_gpu=True) as fit:
        t = fit.state
        images, labels = torch.rand(32, 1, 8, 8, device=t.device), torch.randint(10, (32,), device=t.device)
        t.batches = Made([DeviceBatch(images, labels, 1.0)])
        evaluate(t, lambda: False)
        ends = EvaluationAccumulator.all_reduce

        def end(tally: EvaluationAccumulator) -> Evaluation:
            torch.cuda.set_sync_debug_mode("default")
            return ends(tally)

        monkeypatch.setattr(EvaluationAccumulator, "all_reduce", end)
        with no_wait():
            evaluate(t, lambda: False)
