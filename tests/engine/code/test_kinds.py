"""Which untracked files count as code, by their names."""

from __future__ import annotations

import pytest

from engine.code.kinds import is_code, is_output


@pytest.mark.parametrize(
    "path",
    ["train.py", "conf/model.yaml", "ds_config.json", "Makefile", "requirements-dev.txt", "kernel.so", "results.py"],
)
def test_programs_configs_and_unknown_kinds_count(path: str) -> None:
    assert is_code(path) and not is_output(path)


@pytest.mark.parametrize(
    "path", ["out.txt", "NOTES.md", "results.json", "eval/test-metrics.yaml", "plot.PNG", "model.pt", "output"]
)
def test_texts_data_and_results_do_not_count(path: str) -> None:
    assert not is_code(path)


@pytest.mark.parametrize("path", ["results.csv", "train.log", "slurm-1.out", "wandb/run/a.py", "a/.hydra/config.yaml"])
def test_logs_and_tables_are_not_even_recorded(path: str) -> None:
    assert is_output(path)
