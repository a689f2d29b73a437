"""Stage a: does it start? One GPU, then two, before any measurement."""

from __future__ import annotations

import json

from stage import Context, Row, Step, StepFailedError, last_line

EQUAL_CPU = "equal_cpu"  # a part of the names of tests
MIN_ACCURACY = 0.85  # of the preset digits after two epochs


def list_gpus(context: Context) -> list[Row]:
    """`gputrain gpus` lists the GPUs of torch under the same names."""
    listed = json.loads(context.gputrain("gpus", "--json").stdout)
    names = sorted(gpu["name"]["value"] or "unknown" for gpu in listed["gpus"])
    if len(names) < len(context.machine.gpus):
        raise StepFailedError(f"gputrain lists {len(names)} GPUs, torch {len(context.machine.gpus)}: {listed['error']}")
    unknown = sorted(key for key, reading in listed["gpus"][0].items() if is_unknown(reading))
    return [
        Row("gputrain gpus", f"{len(names)} GPUs; unknown readings: {', '.join(unknown) or 'none'}", {"names": names})
    ]


def is_unknown(reading: object) -> bool:
    return isinstance(reading, dict) and "value" in reading and reading["value"] is None


def train_digits(context: Context) -> list[Row]:
    run = context.train("one", "digits", "--epochs", "2", "--gpus", "0")
    accuracy = run.summary["best_val_accuracy"]
    if accuracy < MIN_ACCURACY:
        raise StepFailedError(f"validation accuracy {accuracy:.1%} after two epochs, expected {MIN_ACCURACY:.0%}")
    done = context.gputrain("evaluate", str(run.path), "--gpus", "0", "--json")
    if done.returncode != 0:
        raise StepFailedError(f"gputrain evaluate: {last_line(done.stderr)}")
    evaluated = json.loads(done.stdout)["top1"]
    if abs(evaluated - accuracy) > 0.005:
        raise StepFailedError(f"evaluate finds an accuracy of {evaluated:.2%}, the run {accuracy:.2%}")
    seconds = run.summary["seconds"]
    return [Row("digits on one GPU", f"{accuracy:.1%} after two epochs, the same in evaluate", {"seconds": seconds})]


def train_on_two_gpus(context: Context) -> list[Row]:
    """Two ranks under NCCL train to the end: a hang at the start ends with the time of this step."""
    run = context.train("two", "digits", "--epochs", "2", "--gpus", "free:2")
    started = run.events("run_started")[0]
    accuracy = run.summary["val_accuracy"]
    if len(started["devices"]) != 2 or accuracy < MIN_ACCURACY:
        raise StepFailedError(f"devices {started['devices']}, validation accuracy {accuracy:.1%}")
    return [Row("digits on two GPUs", f"{accuracy:.1%} after two epochs", {"seconds": run.summary["seconds"]})]


def compare_ddp_with_cpu(context: Context) -> list[Row]:
    tested = context.test("tests/end_to_end/test_gpu.py", EQUAL_CPU)
    return [Row("losses of 1 to N GPUs equal those of CPU ranks", tested)]


STEPS = [
    Step("gputrain gpus", list_gpus, 30),
    Step("digits on one GPU", train_digits, 90),
    Step("digits on two GPUs", train_on_two_gpus, 90, gpus=2),
    Step("losses of 1 to N GPUs equal those of CPU ranks", compare_ddp_with_cpu, 150),
]
