"""The registry of metrics in `gputrain runs` and `gputrain compare`: one key is one number and one order in both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.runs.metric_directions import read_directions
from engine.runs.metrics import Better
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder
from support.runs.trained_run import call


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs: `a` has the largest gap between the losses, `c` the smallest."""
    monkeypatch.setenv("GPUTRAIN_RUNS", str(tmp_path))
    for number, name in enumerate("abc"):
        first, last = (
            replace(
                make_epoch(epoch, 0.9 - epoch / 10, 10.0 * epoch), val_loss=2.0, train_loss=1.0 + number / 4,
                metrics={"val f1": 0.5 + number / 10 - epoch / 10, "eval/gap": 0.5 - number / 10 + epoch / 10},
            )
            for epoch in (1, 2)
        )  # fmt: skip
        make_run_folder(tmp_path, name, make_run_started(), first, last)
    return tmp_path


def names(*arguments: str) -> list[str]:
    result = call("runs", "-q", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.split()


def test_direction_of_own_metric_is_stored_for_the_folder(root: Path) -> None:
    assert names("--sort", "best_eval/gap") == ["a", "b", "c"]
    assert call("runs", "better", "eval/gap", "low").stderr == "eval/gap: low is better\n"
    assert names("--sort", "best_eval/gap") == ["c", "b", "a"]
    assert json.loads(call("compare", "a", "c", "--json").stdout)["best"]["best_metrics.eval/gap"] == [1]
    assert call("runs", "better", "eval/gap", "auto").stderr == "eval/gap: high is better\n"
    assert read_directions(root) == {}


def test_direction_is_stored_without_a_runs_folder(tmp_path: Path) -> None:
    runs = tmp_path / "new" / "runs"
    result = call("runs", "better", "loss_scale", "high", "--runs-dir", str(runs))
    assert result.exit_code == 0, result.output
    assert read_directions(runs) == {"loss_scale": Better.HIGH}


def test_direction_needs_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = call("runs", "better", "loss_scale", "high", "--runs-dir", str(tmp_path / "file"))
    assert result.exit_code != 0 and "Not a directory" in result.stderr


@pytest.mark.parametrize("text", ["metrics.eval/gap", '"eval/gap"', 'best_metrics."eval/gap"'])
def test_every_spelling_of_a_metric_sets_its_direction(root: Path, text: str) -> None:
    assert call("runs", "better", text, "low").stderr == "eval/gap: low is better\n"
    assert read_directions(root) == {"eval/gap": Better.LOW}
