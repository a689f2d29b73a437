"""The columns that a list of runs can have."""

from __future__ import annotations

from engine.runs.metrics import METRICS
from engine.runs.run_view import column_choices, known_columns
from support.runs.factories import make_row


def test_column_choices_name_values_and_list_differing_keys_first() -> None:
    rows = [make_row("a", "finished", config={"optim.lr": lr, "model.name": "cnn"}) for lr in (0.1, 0.2)]
    choices = column_choices(rows, ["state"])
    assert [choice.name for choice in choices[:2]] == ["state", "optim.lr"]
    assert choices[1].about == "0.1, 0.2"
    assert {"run.seed", "val_loss"} <= {choice.name for choice in choices}


def test_column_choices_name_own_metrics_and_labels_of_metrics() -> None:
    choices = column_choices([make_row("a", "finished", metrics={"val f1": 0.5})], [])
    about = {choice.name: choice.about for choice in choices}
    assert about["metrics.val f1"] == "your metric val f1 of the last epoch"
    assert about["best_metrics.val f1"] == "your metric val f1, the best of all epochs"
    assert about["images_per_second"] == METRICS["images_per_second"].description


def test_known_columns_omit_names_of_other_versions() -> None:
    known = known_columns(["lr", "no.such.key", "optim.lr", "state"])
    assert [field.name for field in known] == ["optim.lr", "state"]
