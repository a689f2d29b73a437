"""Run stages of the GPU hour: `tests/gpu_hour.sh [--wheels FOLDER] [STAGE ...]`, or pack what a bare machine lacks.

    tests/gpu_hour.sh --pack FOLDER                  on a machine with network: fill FOLDER with wheels
    tests/gpu_hour.sh --wheels FOLDER a b            on the machine with GPUs, which needs Python 3.12, torch and numpy
    tests/gpu_hour.sh a b c                          in an environment with '.[test]'

Each stage writes STAGE-TITLE.md and STAGE-TITLE.json. The exit code is 1 if a step failed or found no time. A step that
needs a GPU, two GPUs or data that is not there says so and does not fail.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import environment

BEGAN = time.monotonic()
FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
# Above the time of all steps of a stage: their end, and that of a process that does not answer.
GRACE_S = 15


@dataclass(frozen=True)
class Stage:
    """A module of this folder with its `STEPS`, and the time for all of them."""

    module: str
    limit_s: int
    description: str


STAGES = {
    "a": Stage("smoke", 220, "one GPU, then two: digits to the end, DDP equals CPU ranks"),
    "b": Stage("speed", 440, "steps against a bare loop, precisions, compile, kernel launches, MFU, scaling"),
    "c": Stage("fashion_mnist", 450, "ResNet-18 to its published accuracy, seconds per epoch; needs --data"),
    "d": Stage("input", 450, "ResNet-50 on JPEG files: threads, shards; the memory pipeline"),
    "e": Stage("faults", 450, "readings against nvidia-smi dmon; kill and resume, hang, out of memory; pytest -m gpu"),
}


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gputrain-gpu-hour"


def parse_arguments() -> argparse.Namespace:
    described = "\n".join(f"  {name}  {stage.description}" for name, stage in STAGES.items())
    parser = argparse.ArgumentParser(
        prog="tests/gpu_hour.sh",
        description=__doc__,
        epilog=f"stages:\n{described}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="a to e, in this order; default: all")
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="install these into an environment of its own first"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-hour"), metavar="FOLDER", help="folder of the results")
    parser.add_argument(
        "--work", type=Path, default=cache_folder(), metavar="FOLDER", help="folder of environment and runs"
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder with the four files of Fashion-MNIST")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="fill this folder with wheels")
    parser.add_argument("--with", dest="more", nargs="+", default=[], metavar="PACKAGE", help="pack these wheels too")
    parser.add_argument("--without", nargs="+", default=[], metavar="PACKAGE", help="do not pack these wheels")
    parser.add_argument("--one-stage", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.stages) - set(STAGES))
    if unknown:
        parser.error(f"no stage {', '.join(unknown)}; stages: {', '.join(STAGES)}")
    return arguments


def run_one(name: str, arguments: argparse.Namespace) -> bool:
    """Run one stage in this process; return whether no step failed."""
    from stage import Machine, Report, run_stage

    # An exit ends the commands of the step, which lead process groups of their own.
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda *_: sys.exit("error: no end within the time of the stage"))
    stage = STAGES[name]
    report = Report.open(name, stage.module, Machine.describe(), arguments.out)
    steps = importlib.import_module(stage.module).STEPS
    return run_stage(report, steps, arguments.work / "runs", arguments.data, BEGAN + stage.limit_s)


def run_in_time(name: str, arguments: argparse.Namespace, python: str | Path) -> bool:
    """Run one stage as a process, which is ended if it outlasts its time; its files keep the finished steps."""
    command = [str(python), str(FOLDER), name, "--one-stage", f"--out={arguments.out}", f"--work={arguments.work}"]
    command += [f"--data={arguments.data}"] if arguments.data else []
    path = os.pathsep.join(filter(None, [str(ROOT), str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})
    try:
        return process.wait(STAGES[name].limit_s + GRACE_S) == 0
    except subprocess.TimeoutExpired:
        print(f"{name}: no end within {STAGES[name].limit_s + GRACE_S} s")
        return False
    finally:
        # The stage ends its own commands on SIGTERM, also if this process is interrupted.
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _: sys.exit(128 + number))
    arguments = parse_arguments()
    for name in ("out", "work", "wheels", "data", "pack"):
        path: Path | None = getattr(arguments, name)
        setattr(arguments, name, path and path.absolute())
    if arguments.pack is not None:
        print(f"{arguments.pack}: {environment.pack(arguments.pack, arguments.more, arguments.without)}")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.one_stage:
        sys.exit(not run_one(arguments.stages[0], arguments))
    began, python = time.monotonic(), Path(sys.executable)
    if arguments.wheels is not None:
        python = environment.create(arguments.work / "environment", arguments.wheels)
    failed = [name for name in sorted(arguments.stages) or STAGES if not run_in_time(name, arguments, python)]
    names = ", ".join(failed) or "none"
    print(f"{time.monotonic() - began:.0f} s; failed or incomplete: {names}; results: {arguments.out}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
