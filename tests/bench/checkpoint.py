"""Measure how long a checkpoint holds up training, and what loading it takes.

Usage: `python tests/bench/checkpoint.py [--megabytes 500] [--rounds 3] [--step-ms 20] [--folder FOLDER]`.

One rank trains a small classifier whose checkpoint has the given size, because of frozen weights. A step waits for
`--step-ms`, as a CPU does for its GPU, or with 0 only computes. In turns, a checkpoint is written between two steps
(`waiting`: what earlier versions did, and what happens if the host lacks memory for a copy) and by the thread
(`background`). Then loads the checkpoint with and without memory mapping, each in a new process: memory is that of
checkpoint and model, without pages of the file.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.training.host_copy import HostCopy, NoHostMemoryError
from engine.training.loop import train_step
from engine.training.trainer import Trainer
from support.runs.in_process import single_rank_trainer

STEPS_BETWEEN = 60
MODEL = """
import torch
from torch import nn

class Padded(nn.Module):
    def __init__(self, num_classes, in_channels=1, megabytes=500):
        super().__init__()
        self.padding = nn.ParameterList(nn.Parameter(torch.randn(1 << 18)) for _ in range(megabytes))
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, images):
        return self.classifier(images.flatten(1))

def build(num_classes, in_channels=1, **options):
    return Padded(num_classes, in_channels, **options)
"""
LOAD = """
import sys, time
from pathlib import Path
import torch
from engine.training import checkpoint
if sys.argv[2] == "read":
    load = torch.load
    torch.load = lambda *args, **kwargs: load(*args, **{**kwargs, "mmap": False})
def status(field):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(field))
before, start, start_cpu = status("RssAnon"), time.perf_counter(), time.process_time()
state = checkpoint.load_checkpoint(Path(sys.argv[1]))
loaded = time.perf_counter() - start
weights = {name: torch.empty_like(value) for name, value in state["model"].items()}
for name, value in weights.items():
    value.copy_(state["model"][name])
total = time.perf_counter() - start
print(loaded, total, time.process_time() - start_cpu, status("RssAnon") - before)
"""


class NoCopy(HostCopy):
    """A host without memory for a copy: checkpoints are written between two steps."""

    def copy(self, state: object) -> dict[str, object]:
        raise NoHostMemoryError("none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        (folder / "padded.py").write_text(MODEL)
        path = measure_saves(folder, options)
        measure_loads(path, options.rounds)


@dataclass(frozen=True)
class SaveTimes:
    """Milliseconds around one checkpoint; `cpu` is the CPU time of the main thread in the step with the checkpoint."""

    before: float
    step: float
    cpu: float
    median_after: float
    longest_after: float
    written: float


def measure_saves(folder: Path, options: argparse.Namespace) -> Path:
    """Print a row for each checkpoint; return the path of the last one."""
    recipe = (
        *("model.name=padded:build", f"model.options={{megabytes: {options.megabytes}}}", "model.freeze=[padding]"),
        *(f"run.code={folder}", "run.epochs=100000", "checkpoint.every_minutes=0", "checkpoint.keep=1"),
        *("optim.name=sgd", "data.pipeline=memory"),
    )
    (folder / "run").mkdir()
    with single_rank_trainer(*recipe, folder=folder / "run") as trainer:
        writer = trainer._checkpoint_writer
        copies = {"waiting": NoCopy(trainer.state.device), "background": writer._host_copy}
        live = {"model": trainer.state.model.state_dict()}
        take_steps(trainer, STEPS_BETWEEN, options)
        print(f"Steps wait for {options.step_ms:g} ms. All times in ms.\n")
        print(
            "| | step without | step with a checkpoint | its CPU time | steps until written | longest | written after |"
        )
        print("|---|---|---|---|---|---|---|")
        for _ in range(options.rounds):
            for name, host_copy in copies.items():
                writer._host_copy = host_copy
                row = measure_save(trainer, options)
                print(f"| {name} | " + " | ".join(f"{value:.0f}" for value in astuple(row)) + " |", flush=True)
            wall, cpu = timed(lambda: copies["background"].copy(live))
            print(f"| the copy alone | | {wall:.0f} | {cpu:.0f} | | | |", flush=True)
        trainer.finish_checkpoint()
    return folder / "run" / "checkpoints" / "last.pt"


def measure_save(trainer: Trainer, options: argparse.Namespace) -> SaveTimes:
    writer = trainer._checkpoint_writer
    before = take_steps(trainer, STEPS_BETWEEN, options)
    start = time.perf_counter()

    def save_and_step() -> None:
        writer.write(background=True)
        take_step(trainer, options)

    step, cpu = timed(save_and_step)
    after: list[float] = []
    while writer._in_flight is not None:
        after += take_steps(trainer, 1, options)
    written = 1000 * (time.perf_counter() - start)
    # A step without a checkpoint in flight follows one that waited for it.
    after = after or take_steps(trainer, 1, options)
    return SaveTimes(statistics.median(before), step, cpu, statistics.median(after), max(after), written)


def take_steps(trainer: Trainer, count: int, options: argparse.Namespace) -> list[float]:
    return [timed(lambda: take_step(trainer, options))[0] for _ in range(count)]


def take_step(trainer: Trainer, options: argparse.Namespace) -> None:
    state = trainer.state
    if state.position.step_in_epoch >= state.sampler.steps_per_epoch:
        state.start_epoch(state.position.epoch + 1)
    trainer.handle_requests()
    train_step(state)
    time.sleep(options.step_ms / 1000)


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Return milliseconds by the clock, and of CPU time of this thread."""
    start, start_cpu = time.perf_counter(), time.thread_time()
    function()
    return 1000 * (time.perf_counter() - start), 1000 * (time.thread_time() - start_cpu)


def measure_loads(path: Path, rounds: int) -> None:
    print(f"\nA file of {path.stat().st_size / 1e6:.0f} MB:\n")
    print("| loading | verified and loaded | weights copied | CPU time | memory of both |")
    print("|---|---|---|---|---|")
    for _ in range(rounds):
        for how in ("read", "mapped"):
            command = [sys.executable, "-c", LOAD, str(path), how]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            loaded, total, cpu, anonymous = map(float, done.stdout.split())
            print(f"| {how} | {loaded:.2f} s | {total:.2f} s | {cpu:.2f} s | {anonymous:.0f} MiB |", flush=True)


if __name__ == "__main__":
    main()
