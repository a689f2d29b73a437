"""Stage e: readings against nvidia-smi, SIGKILL and resume, a hung kernel, out of memory, and the tests on GPUs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import readings
from smoke import EQUAL_CPU
from stage import ROOT, Context, Row, Run, Step, StepFailedError, StepSkippedError, gputrain_command, last_line

SAMPLES = 15
LOAD_START_S = 15  # of CUDA, and until the clocks are those under load
WATCHDOG_S = 15
MIN_LOAD_PERCENT = 50
GPU_RUNS = "tests/end_to_end/test_gpu.py"


def compare_readings(context: Context) -> list[Row]:
    """Sample with gputrain and with nvidia-smi dmon at the same time, under load."""
    if shutil.which("nvidia-smi") is None:
        raise StepSkippedError("needs nvidia-smi")
    # Drivers before GPM refuse the option.
    with_gpm = context.run([*readings.DMON, "-c", "1", readings.GPM_OPTION]).returncode == 0
    dmon = [*readings.DMON, "-c", str(SAMPLES), *([readings.GPM_OPTION] if with_gpm else [])]
    with context.started([sys.executable, Path(__file__).with_name("load_gpu.py")], "load.log") as load:
        time.sleep(LOAD_START_S)
        if load.poll() is not None:
            raise StepFailedError(f"load_gpu.py: {last_line((context.folder / 'load.log').read_text())}")
        with context.started(dmon, "dmon.log") as theirs:
            ours = context.gputrain("gpus", "--json", "--watch", "--interval", "1", "--count", str(SAMPLES))
            with suppress(subprocess.TimeoutExpired):
                theirs.wait(min(10, context.seconds_left()))
    samples = readings.reading_medians([json.loads(line) for line in ours.stdout.splitlines()])
    output = readings.dmon_medians((context.folder / "dmon.log").read_text(), with_gpm)
    if ours.returncode != 0 or not samples or not output:
        raise StepFailedError(f"no readings: gputrain {last_line(ours.stderr)}; dmon.log has {len(output)} columns")
    if output.get("sm", 0) < MIN_LOAD_PERCENT:
        raise StepFailedError(f"nvidia-smi's GPU 0 is not the one under load: {output.get('sm')}% utilization")
    compared = readings.compare(samples, output)
    return [Row(f"reading {name}", values, {}, "ok" if agree else "failed") for name, values, agree in compared]


def kill_and_resume(context: Context) -> list[Row]:
    """Kill all processes of a run after its first checkpoint; resume it to its end."""
    epochs, run = context.size(200, 12), Run(context.folder / "killed")
    arguments = ("run", "--headless", "digits", "--epochs", str(epochs), "--gpus", "free:1")
    with context.started(gputrain_command(*arguments, "--name", "killed", f"--runs-dir={context.folder}"), "run.log"):
        while not (run.path / "checkpoints" / "last.pt").exists():
            if context.seconds_left() <= 1:
                raise StepFailedError(f"no checkpoint: {last_line((context.folder / 'run.log').read_text())}")
            time.sleep(0.05)
    trained = len(run.events("epoch"))
    if trained >= epochs:
        raise StepFailedError("the run ended before it was killed")
    began = time.monotonic()
    done = context.gputrain("resume", str(run.path), "--headless")
    if done.returncode != 0:
        raise StepFailedError(f"gputrain resume: exit code {done.returncode}: {last_line(done.stderr)}")
    resumed = run.events("run_resumed")[-1]["from_step"]
    result = f"killed after epoch {trained}, resumed from step {resumed} to epoch {run.summary['epochs']}"
    if resumed == 0 or run.summary["state"] != "finished" or run.summary["epochs"] != epochs:
        raise StepFailedError(f"{result} of {epochs}, {run.summary['state']}")
    return [Row("SIGKILL and resume", result, {"seconds": time.monotonic() - began})]


def fail(context: Context, title: str, fault: str, expected: str, *keys: str) -> list[Row]:
    """Run a model with a fault; its last line of output must name the cause."""
    shutil.copy(Path(__file__).with_name("faulty_model.py"), context.folder)
    model = ("model.name=faulty_model:Model", f"model.options={{fault: {fault}, step: 30}}")
    began = time.monotonic()
    options = ("--gpus", "free:1", "--name", fault, f"--runs-dir={context.folder}")
    done = context.gputrain("run", "--headless", "digits", *options, *model, *keys)
    message = last_line(done.stderr)
    if done.returncode != 1 or expected not in message:
        raise StepFailedError(f"exit code {done.returncode}, expected 1 and {expected!r}: {message}")
    return [Row(title, message, {"seconds": time.monotonic() - began})]


def hang_kernel(context: Context) -> list[Row]:
    expected = f"no progress for {WATCHDOG_S} s (run.watchdog)"
    return fail(context, "a kernel that does not end", "hang", expected, f"run.watchdog={WATCHDOG_S}")


def exhaust_memory(context: Context) -> list[Row]:
    return fail(context, "out of memory", "memory", "out of memory")


def gpu_test_files() -> list[str]:
    """Test files with the marker gpu, whole runs first."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    names = [str(path.relative_to(ROOT)) for path in files]
    return sorted(names, key=lambda name: (name != GPU_RUNS, name))


def test_step(file: str) -> Step:
    """The step of a test file, without the tests of stage a."""
    return Step(file, lambda context: [Row(file, context.test(file, f"not {EQUAL_CPU}"))], 200)


STEPS = [
    Step("readings against nvidia-smi dmon", compare_readings, 60, card=True),
    Step("SIGKILL and resume", kill_and_resume, 90),
    Step("a kernel that does not end", hang_kernel, 75, card=True),
    Step("out of memory", exhaust_memory, 60),
    *map(test_step, gpu_test_files()),
]
