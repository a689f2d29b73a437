"""What `gputrain evaluate` and `predict` take, and what they refuse in one sentence."""

from __future__ import annotations

import json

import pytest

from engine.runs.folder import RunFolder
from support.messages import says
from support.runs.trained_run import call, saved_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return saved_run(tmp_path_factory.mktemp("runs") / "a")


@pytest.mark.parametrize(
    ("arguments", "code", "location", "values"),
    [
        (["--split", "test"], "unknown-value", "--split", ["test ", "train, val, all"]),
        (["--list", "uncertan"], "unknown-value", "--list", ["mistakes, uncertain, label-issues", "uncertain?"]),
        (["--again"], "no-effect", "--again", ["--list"]),
        (["--lr", "0.1"], "unknown-option", "--lr", ["has no effect on ", "optim.lr"]),
        (["optim.lr=0.1"], "fixed-value", "optim.lr", []),
        (["--gpus", "0,1"], "not-supported", "--gpus", ["0,1 "]),
    ],
)
def test_evaluate_refuses_in_one_sentence(
    run: RunFolder, arguments: list[str], code: str, location: str, values: list[str]
) -> None:
    done = call("evaluate", run.path, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {location}: ") and len(done.stderr.splitlines()) == 1
    assert says(done.stderr, code, *values)


def test_evaluate_takes_flags_of_data_as_its_keys(run: RunFolder) -> None:
    by_flag = call(
        "evaluate", run.path, "--dataset", "fake", "data.num_classes=5", "--batch-size", "7", "--gpus", "cpu", "--json"
    )
    by_key = call(
        "evaluate", run.path, "data.dataset=fake", "data.num_classes=5", "data.batch_size=7", "--gpus", "cpu", "--json"
    )
    assert by_flag.exit_code == 0, by_flag.output
    assert by_flag.stdout == by_key.stdout
    assert json.loads(by_flag.stdout)["dataset"] == "fake"


def test_evaluate_prints_each_given_list_and_keeps_them_all(run: RunFolder) -> None:
    done = call(
        "evaluate", run.path, "--list", "label-issues", "--list", "mistakes", "-n", "2", "--gpus", "cpu", "--json"
    )
    assert done.exit_code == 0, done.output
    values = json.loads(done.stdout)
    assert values["split"] == "val"
    assert {name: len(images) <= 2 for name, images in values["lists"].items()} == {
        "mistakes": True,
        "label-issues": True,
    }
    written = run.inspection.stat().st_mtime_ns
    # The other list comes from the stored result.
    other = call("evaluate", run.path, "--list", "uncertain", "--gpus", "cpu")
    assert other.exit_code == 0 and "Most uncertain images" in other.stdout
    assert run.inspection.stat().st_mtime_ns == written
