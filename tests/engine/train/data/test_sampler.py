"""Random bits, train/validation split, epoch order and batches per rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.train.data.checks import sampler_warnings
from engine.train.data.sampler import (
    BatchRequest,
    DistributedBatchSampler,
    Part,
    RandomStream,
    _splitmix64,
    balanced_order,
    batch_random_bits,
    epoch_permutation,
    image_random_bits,
    random_bits,
    stratified_split,
)
from support.messages import has_problem


def make_sampler(
    rank: int,
    world: int,
    *,
    train: int = 103,
    val: int = 101,
    batch: int = 8,
    drop_last: bool = True,
    accumulate: int = 1,
) -> DistributedBatchSampler:
    return DistributedBatchSampler(train, val, batch, rank, world, drop_last, 3, accumulate)


def test_random_bits_match_scalar_splitmix64() -> None:
    key = _splitmix64(_splitmix64(_splitmix64(7) ^ RandomStream.SHUFFLE) ^ 2)
    bits = random_bits(7, RandomStream.SHUFFLE, 2, np.arange(5))
    assert [int(value) for value in bits] == [_splitmix64(index ^ key) for index in range(5)]
    assert [image_random_bits(7, RandomStream.SHUFFLE, 2, index) for index in range(5)] == bits.tolist()


def test_random_draws_are_those_of_earlier_versions() -> None:
    # A run of an earlier version resumes with the same split, order and augmentation.
    per_stream = [image_random_bits(7, stream, 2, 5) >> 56 for stream in RandomStream]
    assert per_stream == [93, 95, 16, 123, 86, 54, 90, 35, 54, 159, 212, 223, 167, 169, 49, 68, 114, 13, 249, 240, 85]
    per_batch = [
        batch_random_bits(7, RandomStream.MIXUP, 2, batch, rank) >> 56 for batch in range(4) for rank in range(2)
    ]
    assert per_batch == [89, 160, 215, 177, 64, 165, 26, 164]
    assert epoch_permutation(8, 7, 2).tolist() == [1, 0, 4, 5, 2, 6, 7, 3]
    assert stratified_split(np.repeat([0, 1], 8), 0.25, seed=7)[1].tolist() == [0, 5, 12, 13]


def test_epoch_permutation_changes_each_epoch() -> None:
    first, second = epoch_permutation(1000, 0, 1), epoch_permutation(1000, 0, 2)
    assert sorted(first.tolist()) == list(range(1000))
    assert (first == second).mean() < 0.02
    assert (first == epoch_permutation(1000, 0, 1)).all()


LABELS = np.repeat([0, 1, 3], [900, 90, 10])


def test_balanced_order_draws_each_class_and_its_images_equally_often() -> None:
    order = np.concatenate([balanced_order(LABELS, 0, epoch) for epoch in range(1, 11)])
    shares = np.bincount(LABELS[order])[[0, 1, 3]] / len(order)
    assert np.allclose(shares, 1 / 3, atol=0.02)
    rare = np.bincount(order)[LABELS == 3]
    assert np.allclose(rare / rare.sum(), 0.1, atol=0.02)
    assert balanced_order(LABELS, 0, 1).tolist() != balanced_order(LABELS, 0, 2).tolist()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_balanced_sampler_draws_same_images_for_any_number_of_ranks(world: int) -> None:
    def drawn(world: int, first_step: int = 0) -> list[list[tuple[int, int]]]:
        samplers = [
            replace(make_sampler(rank, world, batch=8 // world), balanced_labels=LABELS) for rank in range(world)
        ]
        samplers = [replace(sampler, train_images=len(LABELS)) for sampler in samplers]
        steps = zip(*(sampler.train_requests(2, first_step) for sampler in samplers), strict=True)
        return [
            sorted((i, j) for batch in step for i, j in zip(batch.indices, batch.random_indices, strict=True))
            for step in steps
        ]

    assert drawn(world) == drawn(1)
    assert drawn(world, 40) == drawn(1)[40:]


def test_balanced_sampler_augments_an_image_differently_in_each_step() -> None:
    sampler = replace(make_sampler(0, 1, train=len(LABELS)), balanced_labels=LABELS)
    drawn = [set(batch.random_indices[LABELS[batch.indices] == 3].tolist()) for batch in sampler.train_requests(1)]
    assert sum(map(len, drawn)) == len(set().union(*drawn)) > 10


def test_stratified_split_keeps_class_ratios() -> None:
    labels = np.repeat([0, 1, 2], [100, 50, 2])
    train, val = stratified_split(labels, 0.2, seed=0)
    assert sorted([*train, *val]) == list(range(152))
    assert np.bincount(labels[val]).tolist() == [20, 10, 1]
    assert (stratified_split(labels, 0.2, seed=1)[1] != val).any()


def test_stratified_split_trains_on_class_with_single_image() -> None:
    train, val = stratified_split(np.array([0, 0, 0, 1]), 0.5, seed=0)
    assert 3 in train
    assert len(val) == 2


@pytest.mark.parametrize("val_split", [0.05, 0.25, 0.5, 0.9])
def test_split_selects_images_with_smallest_random_bits_of_each_class(val_split: float) -> None:
    """The definition, class by class: the split of earlier versions, whose runs are resumed."""
    labels = np.random.default_rng(0).integers(0, 40, 700) ** 2 % 37
    expected: list[int] = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(max(round(len(members) * val_split), 1), len(members) - 1)
        expected += members[np.argsort(random_bits(3, RandomStream.SPLIT, 0, members), kind="stable")[:count]].tolist()
    train, val = stratified_split(labels, val_split, seed=3)
    assert val.tolist() == sorted(expected)
    assert sorted([*train, *val]) == list(range(700))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sampler_val_covers_each_image_once(world: int) -> None:
    indices = [
        index
        for rank in range(world)
        for batch in make_sampler(rank, world).evaluation_requests("val", 101)
        for index in batch.indices.tolist()
    ]
    assert sorted(indices) == list(range(101))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sampler_global_batch_is_same_for_any_number_of_ranks(world: int) -> None:
    alone = [sorted(batch.indices.tolist()) for batch in make_sampler(0, 1, batch=8).train_requests(2)]
    ranks = [list(make_sampler(rank, world, batch=8 // world).train_requests(2)) for rank in range(world)]
    together = [sorted(i for rank in ranks for i in rank[step].indices.tolist()) for step in range(len(ranks[0]))]
    assert together == alone


def test_sampler_gives_every_rank_same_batch_count_per_step() -> None:
    ends = [
        [batch.ends_step for batch in make_sampler(rank, 3, batch=4, accumulate=3, drop_last=False).train_requests(1)]
        for rank in range(3)
    ]
    assert ends[0] == ends[1] == ends[2]


def test_sampler_continues_epoch_from_any_batch() -> None:
    sampler = make_sampler(1, 2, train=70_000, batch=1000)
    whole = list(sampler.train_requests(5))
    resumed = list(sampler.train_requests(5, first_step=3))
    assert [batch.indices.tolist() for batch in resumed] == [batch.indices.tolist() for batch in whole[3:]]


def test_sampler_repeats_epochs_without_validation_for_at_least_the_steps() -> None:
    # Six steps per epoch.
    epochs = [[request.epoch for request in make_sampler(0, 2).repeated_train_requests(steps)] for steps in (6, 7)]
    assert epochs == [[1] * 6, [1] * 6 + [2] * 6]


def test_sampler_drops_or_distributes_last_partial_batch() -> None:
    assert make_sampler(0, 2).steps_per_epoch == 6
    assert make_sampler(0, 2, drop_last=False).steps_per_epoch == 7
    last = [list(make_sampler(rank, 2, drop_last=False).train_requests(1))[-1] for rank in range(2)]
    assert [len(batch.indices) for batch in last] == [4, 3]
    assert sum(batch.loss_weight for batch in last) == pytest.approx(2)
    assert [batch.loss_weight for batch in last] == pytest.approx([8 / 7, 6 / 7])


def test_sampler_gives_rank_without_images_zero_weight() -> None:
    last = [list(make_sampler(rank, 3, train=26, drop_last=False).train_requests(1))[-1] for rank in range(3)]
    assert [batch.loss_weight for batch in last] == [1.5, 1.5, 0.0]
    assert all(len(batch.indices) == 1 for batch in last)


@pytest.mark.parametrize(("drop_last", "images"), [(True, 96 - 32), (False, 103 - 32)])
def test_sampler_counts_remaining_images_of_epoch(drop_last: bool, images: int) -> None:
    assert make_sampler(0, 2, drop_last=drop_last).images_from_step(2) == images
    assert make_sampler(0, 2, drop_last=drop_last).images_from_step(7) == 0


def test_sampler_warns_about_many_dropped_images() -> None:
    assert not [*sampler_warnings(make_sampler(0, 2))], "7 of 103"
    (warning,) = sampler_warnings(make_sampler(0, 2, batch=20))
    assert has_problem([warning], "images-dropped", "", "23 of 103 ", "data.drop_last=false")
    assert not [*sampler_warnings(make_sampler(0, 2, batch=20, drop_last=False))]


def test_sampler_computes_smallest_batch_of_any_rank() -> None:
    assert make_sampler(0, 2).min_batch_size == 8
    assert make_sampler(0, 2, drop_last=False).min_batch_size == 3
    assert make_sampler(0, 3, train=25, drop_last=False).min_batch_size == 1
    assert make_sampler(0, 2, batch=4, accumulate=2, drop_last=False).min_batch_size == 3
    assert make_sampler(0, 1, train=21, batch=4, accumulate=3, drop_last=False).min_batch_size == 3


def test_sampler_run_alternates_training_and_validation() -> None:
    parts_and_epochs = [
        (request.part, request.epoch)
        for request in make_sampler(0, 1, train=16, val=9).requests(2, first_epoch=1, first_batch=1)
    ]
    evaluation = [("val", 0), ("val", 0)]
    assert parts_and_epochs == [("train", 1), *evaluation, ("train", 2), ("train", 2), *evaluation]


@pytest.mark.parametrize(
    ("part", "readable", "kept", "weight"),
    [
        ("train", [True, True, True, True], [7, 3, 5, 1], 0.5),
        ("train", [False, True, False, True], [3, 1], 0.25),
        ("train", [False, False, True, False], [7, 3], 0.0),
        ("train", [False], [7], 0.0),
        ("train", [True], [7], 0.5),
        ("val", [False, False, True, False], [5], 0.125),
        ("val", [False, False], [7], 0.0),
    ],
)
def test_batch_request_keep_selects_and_weights_readable_images(
    part: Part, readable: list[bool], kept: list[int], weight: float
) -> None:
    request = BatchRequest(part, 2, np.array([7, 3, 5, 1])[: len(readable)], 0.5, ends_step=False)
    reduced = request.keep(readable)
    assert reduced.indices.tolist() == kept
    assert (reduced.part, reduced.epoch, reduced.loss_weight, reduced.ends_step) == (part, 2, weight, False)
