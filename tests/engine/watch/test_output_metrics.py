"""Steps, ranks, bars and patterns of the user: what needs more than one line of output."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from engine.base.errors import UsageError
from engine.watch import line_metrics, output_metrics
from engine.watch.output_metrics import OutputMetrics
from engine.watch.points import Point
from support.messages import has_problem


@pytest.fixture(autouse=True)
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_metrics, "PENDING_SECONDS", 0.0)


@pytest.fixture
def metrics() -> OutputMetrics:
    return OutputMetrics()


def feed(metrics: OutputMetrics, *lines: str) -> list[Point]:
    return [point for line in lines for point in metrics.feed(line)]


def steps_of(*lines: str, name: str = "loss") -> list[tuple[int, float]]:
    """Return step and value of a metric in final lines."""
    return [(point.step, point.value) for point in feed(OutputMetrics(), *lines) if point.name == name]


# Notes


def test_line_that_is_too_long_is_said(metrics: OutputMetrics) -> None:
    assert feed(metrics, "loss: 1 ".ljust(line_metrics.MAX_LINE_LENGTH), "word " * line_metrics.MAX_LINE_LENGTH) == [
        Point("loss", 0, 1.0)
    ]
    assert metrics.notes == []
    assert feed(metrics, "loss: 1 " * line_metrics.MAX_NUMBERS + "loss: 1") == []
    assert metrics.notes == [
        "what has more than 4,000 characters, 110 numbers, or 50 that are not NAME=NUMBER in a line was left out"
    ]


# Steps


def test_step_and_epoch_of_line_count() -> None:
    assert feed(OutputMetrics(), "epoch 2 step 30 loss 0.5") == [Point("loss", 30, 0.5, 2.0)]


STEPS = {
    "lines without a step are counted": (["loss: 3", "loading", "loss: 2", "loss: 1"], [0, 1, 2]),
    "lines of one epoch are counted": (["Epoch 0", "loss: 3", "loss: 2", "Epoch 1", "loss: 1"], [0, 1, 2]),
    "whole epochs are steps of lines without others": (["Epoch 1/3 loss: 3", "Epoch 2/3 loss: 2"], [1, 2]),
    "a counter that starts again in each epoch counts on": (
        [f"Epoch [{epoch}/3], Step [{step}/20], loss: {epoch}" for epoch in (1, 2, 3) for step in (10, 20)],
        [10, 20, 30, 40, 50, 60],
    ),
    "a bar that starts again without an epoch counts on": (
        [f"10/10 [00:01<00:00, loss={loss}]" for loss in (3, 2, 1)],
        [10, 20, 30],
    ),
    "a step without a total goes back when the command starts again": (
        ["step 10 loss 3", "step 20 loss 2", "step 15 loss 2"],
        [10, 20, 15],
    ),
    "a counter goes back with its epoch": (
        [f"Epoch [{epoch}/9], Step [20/20], loss: 1" for epoch in (1, 2, 3, 2, 3)],
        [20, 40, 60, 40, 60],
    ),
    "a rank above zero counts if no other prints": ([f"[rank1]: step {step} loss 1" for step in range(6)], [*range(6)]),
}


@pytest.mark.parametrize(("lines", "steps"), STEPS.values(), ids=STEPS)
def test_steps_of_lines_follow_their_counters(lines: list[str], steps: list[int]) -> None:
    assert [step for step, _ in steps_of(*lines)] == steps


def test_count_of_lines_without_step_goes_on_after_a_resume() -> None:
    metrics = OutputMetrics(last=(2, None))
    assert [point.step for point in feed(metrics, "loss: 3", "loss: 2")] == [3, 4]
    assert [point.step for point in feed(OutputMetrics(last=(2, None)), "step 1 loss 2")] == [1]


@pytest.mark.parametrize(("last", "step"), [((40, 2.0), 50), ((35, 2.0), 50), ((50, 3.0), 50), ((40, None), 10)])
def test_counter_of_a_later_epoch_goes_on_after_a_resume(last: tuple[int, float | None], step: int) -> None:
    assert [point.step for point in feed(OutputMetrics(last=last), "Epoch 3 [10/20] loss: 2")] == [step]


def test_mean_of_epoch_is_another_curve_than_its_steps() -> None:
    lines = ("Epoch 1 [100/100] loss: 0.5", "Epoch 1: loss=0.6", "Epoch 2 [100/100] loss: 0.4")
    assert steps_of(*lines) == [(100, 0.5), (200, 0.4)]
    assert steps_of(*lines, name="summary/loss") == [(100, 0.6)]


def test_batches_of_validation_count_when_all_are_done() -> None:
    lines = ("Train: 0 [  50/50] Loss: 3", "Test: [   0/9] Loss: 9", "Test: [   5/9] Loss: 8", "Test: [   9/9] Loss: 7")
    points = feed(OutputMetrics(), *lines)
    assert [(point.name, point.step, point.value) for point in points] == [("Loss", 50, 3), ("test/Loss", 50, 7)]


# Bars and other lines that may still change


def test_pending_bar_has_points_as_it_changes(metrics: OutputMetrics) -> None:
    bars = [f"{step}/20 [00:01<00:01, loss={20 - step}]" for step in (5, 10, 10, 20)]
    found = [metrics.feed_pending([bar]) for bar in bars]
    assert found == [[Point("loss", 5, 15.0)], [Point("loss", 10, 10.0)], [], [Point("loss", 20, 0.0)]]
    assert metrics.feed(bars[-1]) == []


def test_next_bar_follows_the_one_that_has_become_final(metrics: OutputMetrics) -> None:
    metrics.feed_pending(["20/20 [00:01<00:01, loss=3]"])
    metrics.feed("20/20 [00:01<00:01, loss=3]")
    assert metrics.feed_pending(["5/20 [00:01<00:01, loss=2]"]) == [Point("loss", 25, 2.0)]


def test_lines_with_an_exact_epoch_are_counted_and_keep_it_whatever_the_bar_shows(metrics: OutputMetrics) -> None:
    lines = [
        "{'loss': '3', 'epoch': '0.5'}",
        "{'loss': '2', 'epoch': '1.0'}",
        " 42%|█  | 10/24 [00:01<00:08,  9.9it/s]",
    ]
    assert metrics.feed_pending(lines) == [Point("loss", 0, 3.0, 0.5), Point("loss", 1, 2.0, 1.0)]
    # Settled a while later, when the bar has moved on.
    assert [metrics.feed(line, ["24/24 [00:01<00:08]"]) for line in lines[:2]] == [[], []]
    assert metrics.feed("{'eval_loss': '4', 'epoch': '1.0'}") == [Point("eval_loss", 1, 4.0, 1.0)]
    assert metrics.feed("{'loss': '1', 'epoch': '1.5'}") == [Point("loss", 2, 1.0, 1.5)]


def test_fraction_of_an_epoch_behind_whole_ones_joins_no_step() -> None:
    epochs = [1.0, 1.5, 1.9, 2.0]
    points = feed(OutputMetrics(), *(f"{{'loss': 3, 'epoch': {epoch}}}" for epoch in epochs))
    assert [(point.step, point.epoch) for point in points] == list(zip((1, 2, 3, 4), epochs, strict=True))


def test_summary_of_epoch_has_the_step_of_its_own_bar_not_of_the_next_one(metrics: OutputMetrics) -> None:
    assert [point.step for point in metrics.feed("Epoch 0: 50/50 [00:01<00:00, loss=3]")] == [50]
    below = ["Epoch 1: 4/50 [00:00<00:01, loss=2]"]
    assert metrics.feed("Epoch 0: val_loss=0.5", below) == [Point("val_loss", 50, 0.5, 0.0)]
    assert [point.step for point in metrics.feed_pending(below)] == [54]


def test_bar_of_the_next_epoch_tells_no_step(metrics: OutputMetrics) -> None:
    summaries = [
        (f"epoch {epoch}: {{'accuracy': 0.5, 'loss': {3 - epoch}}}", f"{epoch}/20 [00:00<?]") for epoch in range(3)
    ]
    found = [point for line, bar in summaries for point in metrics.feed(line, [bar]) if point.name == "loss"]
    assert found == [Point("loss", epoch, 3.0 - epoch, float(epoch)) for epoch in range(3)]


def test_bar_that_starts_again_below_lines_without_epoch_tells_no_step(metrics: OutputMetrics) -> None:
    found = [metrics.feed(f"loss: {count}", [f"{count}/20 [00:00<?]"]) for count in (2, 1, 3, 1)]
    assert [point.step for points in found for point in points] == [2, 3, 4, 5]


def test_bar_of_validation_counts_when_it_is_full(metrics: OutputMetrics) -> None:
    assert metrics.feed_pending(["Validation: 50%|█ | 5/10 [00:01<00:01, loss=3]"]) == []
    assert metrics.feed("Validation: 100%|██| 10/10 [00:01<00:00, loss=2]") == [Point("val/loss", 0, 2.0)]


def test_validation_that_counts_from_zero_is_full_one_before_its_total(metrics: OutputMetrics) -> None:
    assert metrics.feed("Test: [  8/10]  Loss:  0.9 ( 0.9)") == []
    assert metrics.feed("Test: [  9/10]  Loss:  0.5 ( 0.5)") == []
    assert [point.value for point in metrics.finish()] == [0.5]


def test_equal_values_of_two_validations_are_two_points() -> None:
    lines = [
        line
        for epoch in range(2)
        for line in (
            f"Train: {epoch} [   1/2 (100%)]  Loss: 1.0 (1.0)",
            "Test: [   1/1]  Loss:  0.5 ( 0.5)  Acc@1: 100.000",
        )
    ]
    assert len(steps_of(*lines, name="test/Acc@1")) == 2


def test_bar_repeats_values_of_validation_once(metrics: OutputMetrics) -> None:
    bars = [f"Epoch 1: {step}/9 [00:01<00:01, train_loss={step}, val_loss=5]" for step in (1, 2)]
    assert [point.name for bar in bars for point in metrics.feed_pending([bar])] == [
        "train_loss", "val_loss", "train_loss",
    ]  # fmt: skip


def test_pending_lines_are_read_a_few_times_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    metrics = OutputMetrics()
    began = time.monotonic()
    found = [metrics.feed_pending([f"step {step} loss 1"]) for step in range(100)]
    assert sum(map(bool, found)) <= 1 + (time.monotonic() - began) / output_metrics.PENDING_SECONDS


def test_lines_of_one_shape_have_one_plan(metrics: OutputMetrics, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    make = line_metrics.make_plan
    monkeypatch.setattr(line_metrics, "make_plan", lambda *args: made.append(args) or make(*args))
    points = feed(metrics, *(f"step {step}/900 | loss {step / 7:.4f} | lr 1e-4 | {step}ms" for step in range(900)))
    # One as the first line, and one below another line with metrics.
    assert len(points) == 1800 and len(made) <= 2


def test_objects_of_one_shape_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = line_metrics.parse_json_object
    monkeypatch.setattr(line_metrics, "parse_json_object", lambda text: parsed.append(text) or parse(text))
    lines = [f"{{'loss': {step / 8}, 'lr': 1e-4, 'step': {step}, 'done': False}}" for step in range(9)]
    assert steps_of(*lines) == [(step, step / 8) for step in range(9)] and len(parsed) == 1
    # The numbers of the text are not those of the object.
    assert steps_of(*(f"{{'loss': {step}, 'name': 'v 2'}}" for step in range(3))) == [(0, 0), (1, 1), (2, 2)]
    assert len(parsed) == 4


# Ranks


@pytest.mark.parametrize(
    "prefix", ["[rank{}]: ", "[rank{}]:", "[default{}]:", "[trainer{}]:", "[train.py/{}]: ", "[RANK {}] "]
)
def test_lines_of_the_lowest_rank_count(prefix: str) -> None:
    lines = [f"{prefix.format(rank)}step 10 loss {rank}" for rank in (1, 0, 2, 1, 0)]
    assert [value for _, value in steps_of(*lines)] == [0, 0]


@pytest.mark.parametrize(
    ("lines", "values"),
    [
        (
            ["0: start", "1: start", *(f"{rank}: step {step} loss {5 + rank}" for step in (1, 2) for rank in (0, 1))],
            [5, 5],
        ),
        (["0: loss 5", "1: loss 4", "1: loss 3", "2: loss 2"], [5, 4, 3, 2]),
    ],
    ids=["labels of srun are ranks", "a step at the beginning is none"],
)
def test_numbers_before_a_colon_are_ranks_if_several_print_a_step(lines: list[str], values: list[float]) -> None:
    assert [value for _, value in steps_of(*lines)] == values


@pytest.mark.parametrize("line", ["[Epoch 3]: loss 0.5", "[step 3]: loss 0.5", "[10]\tloss:0.5"])
def test_brackets_that_are_no_ranks_are_kept(line: str) -> None:
    assert steps_of(line, line.replace("3", "4"))[0][0] in (3, 10)


# Tables


# Patterns of the user


def test_named_groups_of_pattern_are_metrics() -> None:
    metrics = OutputMetrics([r"it(?P<step>\d+) .* cost (?P<cost>[\d.,%]+) \((?P<epoch>\d+)"])
    assert metrics.feed("it30 has cost 1,234.5% (7 of 9") == [Point("cost", 30, 1234.5, 7.0)]


def test_pattern_replaces_built_in_ones_for_its_lines() -> None:
    metrics = OutputMetrics([r"total (?P<total>[\d.]+)"])
    assert [point.name for point in feed(metrics, "loss=1, total 3", "loss=2")] == ["total", "loss"]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("loss=([0-9.]+)", "has no named group for a metric"),
        ("(?P<step>[0-9]+) (?P<epoch>[0-9]+)", "has no named group for a metric"),
        ("(?P<loss>[0-9.+", "is not a regular expression"),
        ("", "has no named group for a metric"),
        ("\x1b(", r"\x1b( is not a regular expression"),
        ("(" * 200_000, "is not a regular expression"),
    ],
    ids=range(6),
)
def test_bad_pattern_is_refused_with_an_example(pattern: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        OutputMetrics([pattern])
    (problem,) = caught.value.problems
    assert problem.location == "--parse" and reason in problem.reason and "(?P<loss>" in problem.advice
    assert len(problem.reason) < 400


def test_names_of_metrics_are_bounded_and_printable(metrics: OutputMetrics) -> None:
    assert [point.name for point in metrics.feed(r'{"loss\u001b[2J": 3}')] == [r"loss\x1b[2J"]
    points = feed(metrics, *(f"{{'loss{number}': 1}}" for number in range(2100)))
    assert len({point.name for point in points}) < 2001


def test_pattern_that_takes_exponential_time_is_given_up_and_reported() -> None:
    metrics = OutputMetrics([r"(?P<a>(1+)+x)", r"b=(?P<b>\d+)"])
    assert metrics.feed("1" * 60) == []
    assert has_problem(metrics.problems, "timed-out", "--parse", "(1+)+x")
    assert [point.value for point in metrics.feed("b=3 " + "1" * 60)] == [3]


@pytest.mark.parametrize(
    ("text", "value"), [(".5", 0.5), ("1,234.5,", 1234.5), ("85%", 85), ("2k", 2000), ("3.", 3), (": 4;", 4)]
)
def test_group_of_a_pattern_is_a_printed_number(text: str, value: float) -> None:
    assert feed(OutputMetrics(["x(?P<loss>.*)"]), f"x{text}") == [Point("loss", 0, value)]


# What earlier lines say


def names_and_steps(*lines: str) -> list[tuple[str, int]]:
    metrics = OutputMetrics()
    return [(point.name, point.step) for point in [*feed(metrics, *lines), *metrics.finish()]]


BOX = [
    "| rollout/     |      |",
    "|    ep_rew_mean | 9 |",
    "| time/        |      |",
    "|    total_timesteps | 512 |",
    "-----",
]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            ("step 100 loss 0.5", "val_loss: 0.6", "Validation loss: 0.7"),
            [("loss", 100), ("val_loss", 100), ("validation_loss", 100)],
        ),
        (
            ("loss: 2.3  [   64/60000]", "Test Error: ", " Accuracy: 50.9%, Avg loss: 2.1", "loss: 2.2  [  128/60000]"),
            [("loss", 64), ("test/Accuracy", 64), ("test/loss", 64), ("loss", 128)],
        ),
        (
            (
                "[1]\tvalid's auc: 0.8",
                "[2]\tvalid's auc: 0.7",
                "Early stopping, best iteration is:",
                "[1]\tvalid's auc: 0.8",
            ),
            [("valid_auc", 1), ("valid_auc", 2)],
        ),
        (
            (
                "[Epoch 1] val: {'loss': 1.9}",
                "{'epoch': 2, 'mode': 'val', 'loss': 3}",
                "{'epoch': 2, 'mode': 'train', 'loss': 4}",
            ),
            [("val/loss", 1), ("val/loss", 2), ("loss", 2)],
        ),
        (BOX, [("rollout/ep_rew_mean", 512)]),
        (BOX[:4], [("rollout/ep_rew_mean", 512)]),
    ],
    ids=[
        "the validation has the step of the training",
        "lines below the heading of an evaluation are of it",
        "a recap of the best step is no point",
        "an object says what it was measured on",
        "the step of a box comes last",
        "a box that ends with the output",
    ],
)
def test_names_and_steps_follow_earlier_lines(lines: Sequence[str], expected: list[tuple[str, int]]) -> None:
    assert names_and_steps(*lines) == expected


def test_unknown_names_of_regular_lines_are_learned_when_their_step_grows() -> None:
    lines = [f"{step}:\tlearn: 0.{step}\tbest: 0.5 ({step})\tremaining: 3s" for step in range(4)]
    assert names_and_steps(*lines[:2]) == []
    assert names_and_steps(*lines) == [(name, step) for step in range(4) for name in ("learn", "best")]
    assert names_and_steps(*lines[:1] * 4) == []


@pytest.mark.parametrize(
    ("heading", "row", "expected"),
    [
        (
            "epoch     train_loss  valid_loss  time",
            "2         0.7       0.8  00:12",
            [("train_loss", 2), ("valid_loss", 2)],
        ),
        ("E    #       LOSS TEXTCAT  SCORE", "  2      10          2.29   1.00", [("loss_textcat", 10), ("SCORE", 10)]),
        ("it: AP,AP50,AP75", "it: 37.9,58.8,41.0", [("AP", 0), ("AP50", 0), ("AP75", 0)]),
        ("epoch,loss,acc", "3,0.5,0.25", [("loss", 3), ("acc", 3)]),
        ("train/loss,time/total_timesteps,time/fps", "0.5,512,99", [("train/loss", 512)]),
    ],
)
def test_rows_below_a_heading_have_its_names(heading: str, row: str, expected: list[tuple[str, int]]) -> None:
    assert names_and_steps(heading, row) == expected


@pytest.mark.parametrize(
    ("train", "val"), [("train: loss", "val: loss"), ("[TRAIN] loss", "[VALID] loss"), ("loss:", "Validation: loss:")]
)
def test_lines_of_training_and_validation_without_position_are_two_curves(train: str, val: str) -> None:
    points = feed(OutputMetrics(), *(f"{form} {value}" for value in (1, 2, 3) for form in (train, val)))
    assert [point.value for point in points if point.name == "loss"] == [1, 2, 3]
    assert len({point.name for point in points}) == 2


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("Episode 3: steps=200, reward=10", 3),
        ("(epoch: 1, iters: 100, time: 0.3) D_A: 0.2 G_A_loss: 0.3", 100),
        ("episode: 7/500, score: 5, loss: 1", 7),
        ("Nov 30 12:00:01 host train[12]: step 4 loss 0.8", 4),
    ],
)
def test_position_is_the_counter_of_the_line(line: str, step: int) -> None:
    points = feed(OutputMetrics(), line)
    assert {point.step for point in points} == {step}
    assert not {"Episode", "episode", "steps", "Nov"} & {point.name for point in points}


def test_row_of_a_box_of_any_width_is_read_quickly() -> None:
    began = time.process_time()
    OutputMetrics().feed("| a | " + " " * 3900 + "}")
    assert time.process_time() - began < 0.1


def test_digits_in_names_tell_lines_of_one_form_apart() -> None:
    lines = [f"step {step} acc@{k} 0.{step}" for step in (1, 2, 3, 4) for k in (1, 5)]
    points = feed(OutputMetrics(), *lines)
    assert points == [Point(f"acc@{k}", step, step / 10) for step in (1, 2, 3, 4) for k in (1, 5)]


def test_lines_of_one_form_are_read_with_what_is_above_them(metrics: OutputMetrics) -> None:
    lines = [f"loss: 0.{step}" for step in (1, 2, 3)]
    feed(metrics, "hello", *lines)
    assert feed(metrics, "[rank1]: loss: 0.4") == feed(metrics, "[rank0]: loss: 0.5")[1:] == []
    assert [point.step for point in feed(metrics, "step 40 loss: 0.6", "loss: 0.7")] == [40, 40]


def test_blank_lines_below_a_heading_end_no_block() -> None:
    assert steps_of("Epoch 1:", "done", " ", "  loss: 0.5", "  step: 40", "done") == [(40, 0.5)]
