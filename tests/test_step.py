"""What a healthy step does not do: ask the device for a value, which on a GPU would be a wait for all that it has
still to compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from engine.beats import Beats, Marker
from engine.channel import DirectChannel, StopFlag
from engine.control import Asked
from engine.data import image_format, open_source, shares_of
from engine.data.loader import Batches
from engine.job import Job
from engine.loop import Trainer, train_step
from engine.machine import plan
from engine.resolve import resolve
from engine.seat import Seat
from engine.worker import set_up


class Asking(TorchDispatchMode):
    """Counts how often a value is asked for: by `item`, `tolist`, `bool`, or a copy to the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["halt", "skip"])
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    """One rank on the CPU, which goes the same way as one on a GPU."""
    config = resolve("digits", ["device.ranks=1", f"optim.nonfinite={request.param}", "run.log_every=1000"]).config
    seat, source = Seat(0, 1, 0, 1), open_source(config)
    shares, images = shares_of(config, source, 1), image_format(config, source)
    batches = Batches(source, config, images, shares.run(1), workers=0)
    channel = DirectChannel(None, StopFlag(), Asked(), Marker(Beats(1), 0))
    job = Job(config, plan(config, []), None, False, source)
    yield set_up(job, seat, dist.HashStore(), channel, source, shares, images, batches, None).trainer
    dist.destroy_process_group()


def test_a_healthy_step_asks_for_no_value(trainer: Trainer) -> None:
    batch = trainer.next_batch(trainer.totals)
    with Asking() as asking:
        train_step(trainer, *batch)
    assert asking.count == 0
    with Asking() as asking:
        trainer.log.untold()
        assert trainer.totals.counts.tolist()[1] == 32
        assert trainer.totals.loss.item() > 0
    assert asking.count > 0, "it would have been seen"


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_step_that_is_left_out_changes_nothing_even_as_the_first(name: str) -> None:
    from engine.optim import build_optimizer, skip_if

    model = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(resolve(None, [f"optim.name={name}", "optim.momentum=0.9"]).config.optim, model)
    plain = torch.nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    unskipped = build_optimizer(resolve(None, [f"optim.name={name}", "optim.momentum=0.9"]).config.optim, plain)
    for bad in (True, False, True, True, False):
        for one, layer in ((optimizer, model), (unskipped, plain)):
            if bad and one is unskipped:
                continue
            one.zero_grad()
            layer(torch.full((1, 3), float("nan") if bad else 1.0)).sum().backward()
            skip_if(one, torch.tensor(bad))
            one.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
