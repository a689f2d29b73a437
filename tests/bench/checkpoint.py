"""Measure how long a checkpoint holds up training, and what loading it takes.

Usage: `python tests/bench/checkpoint.py [--megabytes 500] [--rounds 3] [--step-ms 20] [--folder FOLDER]`.

One rank trains a small classifier whose checkpoint has the given size, because of frozen weights. A step waits for
`--step-ms`, as a CPU does for its GPU, or with 0 only computes. In turns, checkpoints are written between two steps
(`waiting`: what happens if the host lacks memory for a copy, and what earlier versions did) and by the thread
(`background`). Prints the steps without a checkpoint, the step with it, the steps while the thread writes, and the copy
alone. Then loads the checkpoint with and without memory mapping, each in a new process.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from engine.training.host_copy import HostCopy, NoHostMemoryError
from engine.training.loop import train_step
from engine.training.trainer import Trainer
from in_process import single_rank_trainer

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
before, start = status("RssAnon"), time.perf_counter()
state = checkpoint.load_checkpoint(Path(sys.argv[1]))
loaded = time.perf_counter() - start
weights = {name: torch.empty_like(value) for name, value in state["model"].items()}
for name, value in weights.items():
    value.copy_(state["model"][name])
total = time.perf_counter() - start
print(loaded, total, status("RssAnon") - before)
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


def measure_saves(folder: Path, options: argparse.Namespace) -> Path:
    recipe = (
        *("model.name=padded:build", f"model.options={{megabytes: {options.megabytes}}}", "model.freeze=[padding]"),
        *(f"run.code={folder}", "run.epochs=100000", "checkpoint.every_minutes=0", "checkpoint.keep=1"),
        *("optim.name=sgd", "data.pipeline=memory", "model.init=default"),
    )
    for name in ("waiting", "background"):
        (folder / name).mkdir()
    rows: dict[str, list[list[float]]] = {"waiting": [], "background": []}
    with single_rank_trainer(*recipe, folder=folder / "background") as trainer:
        writer = trainer._checkpoint_writer
        copies = {"waiting": NoCopy(trainer.state.device), "background": writer._host_copy}
        take_steps(trainer, STEPS_BETWEEN, options)
        for _ in range(options.rounds):
            for name, host_copy in copies.items():
                writer._host_copy = host_copy
                rows[name].append(measure_save(trainer, options))
        live = {"model": trainer.state.model.state_dict()}
        copy_seconds = [timed(lambda: copies["background"].copy(live)) for _ in range(options.rounds)]
        trainer.finish_checkpoint()
        first_seconds = timed(lambda: HostCopy(trainer.state.device).copy(live))
    path = folder / "background" / "checkpoints" / "last.pt"
    print(f"checkpoint of {path.stat().st_size / 1e6:.0f} MB, steps of {options.step_ms:g} ms and their computation")
    print(
        f"copy alone: {1000 * statistics.median(copy_seconds):.0f} ms, in fresh memory {1000 * first_seconds:.0f} ms\n"
    )
    print("| | steps without a checkpoint | step with it | steps while the thread writes, longest | written after |")
    print("|---|---|---|---|---|")
    for name, measured in rows.items():
        print(
            f"| {name} |" + "|".join(f" {' / '.join(f'{1000 * row[i]:.0f}' for row in measured)} ms " for i in (0, 1)),
            end="|",
        )
        print(
            " " + ", ".join(" / ".join(f"{1000 * row[i]:.0f}" for row in measured) for i in (2, 3)) + " ms", end=" | "
        )
        print(" / ".join(f"{row[4]:.1f}" for row in measured) + " s |")
    return path


def take_steps(trainer: Trainer, count: int, options: argparse.Namespace) -> list[float]:
    return [timed(lambda: take_step(trainer, options)) for _ in range(count)]


def take_step(trainer: Trainer, options: argparse.Namespace) -> None:
    state = trainer.state
    if state.position.step_in_epoch >= state.sampler.steps_per_epoch:
        state.start_epoch(state.position.epoch + 1)
    trainer.handle_requests()
    train_step(state)
    time.sleep(options.step_ms / 1000)


def measure_save(trainer: Trainer, options: argparse.Namespace) -> list[float]:
    """Return seconds: median step before, step with the checkpoint, median and longest step during, and until it is
    written."""
    writer = trainer._checkpoint_writer
    before = take_steps(trainer, STEPS_BETWEEN, options)
    start = time.perf_counter()

    def save_and_step() -> None:
        writer.write(background=True)
        take_step(trainer, options)

    held = timed(save_and_step)
    during: list[float] = []
    while writer._in_flight is not None:
        during += take_steps(trainer, 1, options)
    written = time.perf_counter() - start
    during = during or [0.0]
    return [statistics.median(before), held, statistics.median(during), max(during), written]


def timed(function: object) -> float:
    start = time.perf_counter()
    function()  # type: ignore[operator]
    return time.perf_counter() - start


def measure_loads(path: Path, rounds: int) -> None:
    print(
        "\n| loading | verified and loaded | weights copied | peak memory added | anonymous memory of the checkpoint |"
    )
    print("|---|---|---|---|---|")
    for _ in range(rounds):
        for how in ("read", "mapped"):
            command = [sys.executable, "-c", LOAD, str(path), how]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            loaded, total, anonymous = map(float, done.stdout.split())
            print(f"| {how} | {loaded:.2f} s | {total:.2f} s | {anonymous:.0f} MiB |")


if __name__ == "__main__":
    main()
