"""Lists that rank inspected images."""

from __future__ import annotations

import numpy as np
import pytest

from engine.runs.inspection import LIST_NAMES
from support.runs.inspections import make_info, make_inspection

IMAGES = make_inspection(
    [[0.9, 0.1, 0.0], [0.3, 0.6, 0.1], [0.05, 0.9, 0.05], [0.4, 0.35, 0.25], [0.1, 0.1, 0.8], [0.5, 0.5, 0.0]],
    [0, 0, 0, 1, 2, 1],
    parts=[1, 1, 0, 1, 1, 0],
)


def test_cell_lists_its_images_by_descending_loss() -> None:
    assert list(IMAGES.cell(0, 1)) == [2, 1]
    assert list(IMAGES.cell(0, 1, "val")) == [1]
    assert list(IMAGES.cell(0, 1, limit=1)) == [2]
    assert list(IMAGES.cell(2, 0)) == []


def test_mistakes_are_ranked_by_probability_of_the_wrong_class() -> None:
    assert list(IMAGES.ranked("mistakes")) == [2, 1, 5, 3]


def test_uncertain_images_are_ranked_by_the_gap_between_their_best_classes() -> None:
    assert list(IMAGES.ranked("uncertain", limit=3)) == [5, 3, 1]


def test_suspected_labels_prefer_images_above_the_threshold_of_the_predicted_class() -> None:
    """The model is sure of owls and never of cats, so a 0.6 for cat is more suspect than a 0.7 for owl."""
    cats, owls = [[0.5, 0.3, 0.2]] * 10, [[0.0, 0.02, 0.98]] * 10
    images = make_inspection([*cats, *owls, [0.25, 0.05, 0.7], [0.6, 0.1, 0.3]], [0] * 10 + [2] * 10 + [0, 2])
    assert list(images.ranked("label-issues")) == [21, 20]
    assert list(images.ranked("mistakes")) == [20, 21]


def test_suspected_labels_have_a_threshold_for_each_part() -> None:
    """A model that is sure of its training images would else leave no image of the validation set above it."""
    train, val = [[0.99, 0.01, 0.0]] * 20, [[0.6, 0.3, 0.1]] * 5
    images = make_inspection(
        [*train, *val, [0.7, 0.3, 0.0], [0.9, 0.05, 0.05]], [0] * 25 + [1, 1], parts=[0] * 20 + [1] * 6 + [0]
    )
    assert list(images.ranked("label-issues")) == [25, 26]


def test_lists_accept_numbers_that_are_not_finite() -> None:
    images = make_inspection([[np.nan] * 3, [0.1, 0.9, 0.0]], [1, 0])
    for name in LIST_NAMES:
        assert sorted(images.ranked(name)) == [0, 1]
    assert np.isnan(images.image(0).loss)


def test_images_without_files_are_named_by_part_and_index() -> None:
    named = make_inspection([[1.0, 0.0, 0.0]], [1], paths=["cat/1.png"])
    assert (IMAGES.image(2).name, named.image(0).name) == ("train 2", "cat/1.png")
    assert (named.image(0).label, named.image(0).predicted, named.image(0).probability) == (1, 0, 1.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"epoch": 6}, "is of epoch 6, not of epoch 7 or 9"),
        ({"epoch": None}, "is of step 70, not of epoch 7 or 9"),
        ({"part": "train"}, "is of the training images"),
        ({"overrides": ("data.path=/other",)}, "is of other data (data.path=/other)"),
    ],
)
def test_stale_reason_compares_with_the_epochs_of_the_evaluation(
    changes: dict[str, object], reason: str | None
) -> None:
    assert make_info(**changes).stale_reason((9, 7)) == reason
