"""Runs below a path: names, nesting, links, pipes, pickles, and many runs."""

from __future__ import annotations

import math
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.watch import reading
from engine.watch.folders import RunFinder, RunFollower, SearchLimits, find_runs, merge_runs
from engine.watch.reading import POLL_BYTES
from support.foreign import event, event_file, scalar
from support.gputrain_command import ROOT

RECORDINGS = Path(__file__).parents[2] / "recordings" / "foreign"


def write_events(folder: Path, *values: float, tag: str = "loss") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    records = (event(step, scalar(tag, value)) for step, value in enumerate(values))
    (folder / "events.out.tfevents.1.host").write_bytes(event_file(*records))


def write_checkpoint(folder: Path, step: int) -> None:
    state = folder / f"checkpoint-{step}" / "trainer_state.json"
    state.parent.mkdir(parents=True)
    state.write_text(f'{{"log_history": [{{"step": {step}, "loss": 0.5}}]}}')


def names_below(path: Path) -> list[str]:
    found = find_runs(path)
    assert not found.is_partial
    return [run.name for run in found.runs]


def test_find_runs_names_folders_by_relative_path() -> None:
    assert names_below(RECORDINGS) == [
        *("accelerate", "keras", "keras-events/train", "keras-events/validation", "lightning/csv", "lightning/tb"),
        *("tensorboardx", "timm", "trainer", "ultralytics"),
    ]


def test_find_runs_takes_a_file(tmp_path: Path) -> None:
    write_events(tmp_path, 1.0)
    shutil.copy(RECORDINGS / "keras/history.csv", tmp_path)
    (run,) = find_runs(tmp_path / "history.csv").runs
    assert (run.name, run.formats, len(run.logs)) == ("history", ("csv",), 1)


def test_find_runs_skips_links_pipes_hidden_folders_runs_and_sweeps_of_gputrain(tmp_path: Path) -> None:
    write_events(tmp_path / "runs/real", 1.0)
    write_events(tmp_path / ".cache/hidden", 1.0)
    own = tmp_path / "runs/own"
    write_events(own / "tensorboard/train", 1.0)
    (own / "events.jsonl").touch()
    (own / "owner.json").touch()
    sweep = tmp_path / "runs/sweep"
    sweep.mkdir()
    (sweep / "sweep.yaml").touch()
    (sweep / "optuna.jsonl").write_text('{"op_code": 7, "step": 1, "intermediate_value": 0.5}\n' * 3)
    (tmp_path / "runs/latest-run").symlink_to("real")
    (tmp_path / "runs/up").symlink_to(tmp_path)
    for name in ("events.out.tfevents.1.host", "metrics.csv", "log.jsonl", "p.db", "a.wandb", "trainer_state.json"):
        pipes = tmp_path / "pipes" / name.partition(".")[0]
        pipes.mkdir(parents=True, exist_ok=True)
        os.mkfifo(pipes / name)
    assert names_below(tmp_path) == ["runs/real"]


def test_find_runs_of_pipe_or_missing_path_returns_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.csv")
    assert names_below(tmp_path / "metrics.csv") == names_below(tmp_path / "missing") == []


def test_find_runs_joins_hyperparameters_of_torch_to_their_run(tmp_path: Path) -> None:
    write_events(tmp_path / "run", 1.0)
    write_events(tmp_path / "run/1800000000.123", 2.0, tag="final")
    (run,) = find_runs(tmp_path).runs
    assert [point.name for point in RunFollower(run).poll()[0].points] == ["loss", "final"]


def test_find_runs_opens_no_pickle(tmp_path: Path) -> None:
    write_events(tmp_path, 1.0)
    for name in ("training_args.bin", "model.pt", "args.pkl"):
        (tmp_path / name).write_bytes(pickle.dumps([1]))
    program = (
        "import sys; from pathlib import Path\n"
        "opened = []\n"
        "def audit(name, values):\n"
        "    if name in ('open', 'pickle.find_class'):\n"
        "        opened.append(name if name != 'open' else str(values[0]))\n"
        "sys.addaudithook(audit)\n"
        "from engine.watch.folders import RunFollower, find_runs\n"
        "from engine.watch.parameters import read_parameters\n"
        "for run in find_runs(Path(sys.argv[1])).runs:\n"
        "    assert RunFollower(run).poll()[0].points\n"
        "    read_parameters(run.folder)\n"
        "print([name for name in opened if name.endswith(('.bin', '.pt', '.pkl', 'pickle.find_class'))])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_finder_imports_no_large_library() -> None:
    modules = "engine.watch.folders, engine.watch.parameters"
    program = f"import {modules}, json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    for name in ("torch", "pydantic", "msgspec", "numpy", "yaml", "tensorboard", "wandb"):
        assert f'"{name}"' not in done.stdout


def test_find_runs_bounds_runs_entries_and_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        write_events(tmp_path / f"run-{number}", 1.0)
    write_events(tmp_path.joinpath(*["d"] * (SearchLimits().depth + 1)), 1.0)
    assert len(names_below(tmp_path)) == 5
    found = find_runs(tmp_path, SearchLimits(runs=3))
    assert (len(found.runs), found.is_partial) == (3, True)
    monkeypatch.setattr(reading, "MAX_ENTRIES", 2)
    found = find_runs(tmp_path)
    assert (len(found.runs) <= 2, found.is_partial) == (True, True)


def test_run_changed_at_follows_checkpoints_that_replace_each_other(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 10)
    [run] = find_runs(tmp_path).runs
    write_checkpoint(tmp_path, 20)
    shutil.rmtree(tmp_path / "checkpoint-10")
    os.utime(tmp_path / "checkpoint-20" / "trainer_state.json", (1.5e9, 1.5e9))
    assert run.changed_at() == 1.5e9
    shutil.rmtree(tmp_path / "checkpoint-20")
    assert run.changed_at() == 0


def test_names_of_runs_and_metrics_are_printable(tmp_path: Path) -> None:
    write_events(tmp_path / "\x1b[2J\udcff", 1.0, tag="loss\x1b]0;x\x07")
    (run,) = find_runs(tmp_path).runs
    (reading,) = RunFollower(run).poll()
    assert (run.name, reading.points[0].name) == ("\\x1b[2J\\udcff", "loss\\x1b]0;x\\x07")


def test_run_finder_finds_new_files_of_folders_that_it_knows(tmp_path: Path) -> None:
    for folder in ("first", "empty", "state/checkpoint-4"):
        (tmp_path / folder).mkdir(parents=True)
    write_events(tmp_path / "first", 1.0)
    (tmp_path / "late.csv").touch()
    for folder in (tmp_path, *tmp_path.rglob("*")):
        os.utime(folder, (1e9, 1e9))
    finder = RunFinder(tmp_path)
    assert [run.name for run in merge_runs(finder.search()).runs] == ["first"]
    (tmp_path / "late.csv").write_text("epoch,loss\n1,0.5\n")
    (tmp_path / "first" / "metrics.csv").write_text("epoch,loss\n1,0.5\n")
    write_events(tmp_path / "empty", 1.0)
    (tmp_path / "state" / "checkpoint-4" / "trainer_state.json").write_text('{"log_history": []}')
    found = {run.name: run.formats for run in merge_runs(finder.search()).runs}
    assert found[tmp_path.name] == ("csv",) and found["first"] == ("tensorboard", "csv")
    assert found.keys() == {tmp_path.name, "first", "empty", "state"}


def test_run_is_found_while_a_checkpoint_is_saved(tmp_path: Path) -> None:
    state = tmp_path / "out" / "checkpoint-10" / "trainer_state.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"log_history": [{"step": 1, "loss": 0.5}], "max_steps": 8}')
    (tmp_path / "out" / "checkpoint-20").mkdir()
    (run,) = find_runs(tmp_path).runs
    (reading,) = RunFollower(run).poll()
    assert run.name == "out" and [point.value for point in reading.points] == [0.5]


def test_run_follower_reads_a_bounded_part_of_many_logs(tmp_path: Path) -> None:
    rows = "".join(f"{step},{step}\n" for step in range(12_000))
    for number in range(8):
        (tmp_path / f"log-{number}.csv").write_text(f"step,loss-{number}\n{rows}")
    size = len(rows)
    (run,) = find_runs(tmp_path).runs
    follower = RunFollower(run)
    read, names = 0, set[str]()
    while True:
        readings = follower.poll()
        now = sum(reading.read_bytes for reading in readings)
        assert now - read <= POLL_BYTES + size
        names |= {point.name for reading in readings for point in reading.points}
        if now == read:
            break
        assert any(reading.share < 1 for reading in readings) or now > 8 * size
        read = now
    assert len(names) == 8 and all(reading.share == 1 for reading in readings)


def test_metric_moves_to_the_preferred_log_when_it_gets_it(tmp_path: Path) -> None:
    write_events(tmp_path, 1.0)
    (tmp_path / "metrics.csv").write_text("step,val_loss,top5\n0,0.75,1\n")
    (run,) = find_runs(tmp_path).runs
    follower = RunFollower(run)
    assert [point.name for point in follower.poll()[1].points] == ["val_loss", "top5"]
    with (tmp_path / "events.out.tfevents.1.host").open("ab") as file:
        file.write(event_file(event(0, scalar("val_loss", 0.5))))
    events, rows = follower.poll()
    assert ([point.name for point in events.points], events.drop_from) == (["val_loss"], None)
    assert ([point.name for point in rows.points], rows.drop_from) == (["top5"], -math.inf)


def test_metric_moves_to_a_later_log_if_the_preferred_one_starts_over_without_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"step": 0, "loss": 1}\n{"step": 1, "loss": 1}\n')
    (tmp_path / "b.csv").write_text("step,loss\n0,1\n1,1\n")
    (run,) = find_runs(tmp_path).runs
    follower = RunFollower(run)
    assert [len(reading.points) for reading in follower.poll()] == [2, 0]
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "a.jsonl").write_text('{"step": 0, "accuracy": 1}\n{"step": 1, "accuracy": 1}\n')
    first, second = follower.poll()
    assert [point.name for point in (*first.points, *second.points)] == ["accuracy"] * 2 + ["loss"] * 2


def test_metrics_that_logs_of_one_format_share_are_named_by_their_files(tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / f"{name}.csv").write_text(f"step,loss,only_{name}\n0,1,2\n1,1,2\n")
    (run,) = find_runs(tmp_path).runs
    follower = RunFollower(run)
    follower.poll()
    readings = follower.poll()
    assert [reading.drop_from for reading in readings] == [-math.inf] * 2
    names = [sorted(reading.points.names) for reading in readings]
    assert names == [["only_train", "train/loss"], ["only_val", "val/loss"]]


def test_printed_log_above_what_the_training_recorded_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "version_0").mkdir()
    (tmp_path / "version_0" / "metrics.csv").write_text("step,loss\n0,1\n")
    (tmp_path / "train.log").write_text("".join(f"step {step} loss 1\n" for step in range(5)))
    assert [run.formats for run in find_runs(tmp_path).runs] == [("csv",)]
    (tmp_path / "version_0" / "metrics.csv").unlink()
    assert [run.formats for run in find_runs(tmp_path).runs] == [("text",)]
