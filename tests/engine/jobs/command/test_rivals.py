"""Metric files that several commands in one folder may have written belong to the one whose parameters they have."""

from __future__ import annotations

from pathlib import Path

from engine.jobs.command.rivals import has_arguments
from engine.watch.folders import find_runs
from engine.watch.reading import Log

RIVALS = [{"lr": 0.2, "max_epochs": 3}, {"lr": 0.3}]


def make_log(folder: Path, text: str) -> Log:
    folder.mkdir()
    (folder / "metrics.csv").write_text("step,loss\n1,0.5\n")
    (folder / "hparams.yaml").write_text(text)
    return find_runs(folder).runs[0].logs[0]


def test_log_with_parameters_of_the_command_is_its_own(tmp_path: Path) -> None:
    log = make_log(tmp_path / "version_0", "lr: 1e-05\nmax_epochs: 3\n")
    assert has_arguments(log, {"lr": 1e-05, "max_epochs": 3}, RIVALS)


def test_log_with_other_or_with_common_parameters_only_is_not(tmp_path: Path) -> None:
    assert not has_arguments(make_log(tmp_path / "a", "lr: 0.2\n"), {"lr": 0.1}, RIVALS)
    assert not has_arguments(make_log(tmp_path / "b", "max_epochs: 3\n"), {"lr": 0.1, "max_epochs": 3}, RIVALS)
    assert not has_arguments(make_log(tmp_path / "c", "seed: 3\n"), {"lr": 0.1}, RIVALS)


def test_state_of_hugging_face_names_its_parameters_itself(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    state = '{"max_steps": 20, "train_batch_size": 4, "log_history": [{"step": 1, "loss": 0.5}]}'
    (tmp_path / "out" / "trainer_state.json").write_text(state)
    log = find_runs(tmp_path).runs[0].logs[0]
    assert has_arguments(log, {"max_steps": 20}, [{"max_steps": 30}])
    assert not has_arguments(log, {"max_steps": 30}, [{"max_steps": 20}])
