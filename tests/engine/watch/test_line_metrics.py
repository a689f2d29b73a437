"""Metrics in single lines of the output of trainers, and lines that only look as if they had some."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.watch.line_metrics import MAX_FREE_NUMBERS, MAX_LINE_LENGTH, MAX_NUMBERS, LineParser, ParsedLine
from engine.watch.line_names import is_held_out, is_position, is_result
from engine.watch.output_metrics import OutputMetrics

STAMP = "2026-11-27 22:25:22,123"
HUGGING_FACE = {"loss": 0.5, "grad_norm": 1.25, "learning_rate": 5e-05}
BAR = "12/100 [00:01<00:08,  9.9it/s"
TORCHTITAN = "step:  1  loss:  8.1025  grad_norm:  1.2  memory:  1.22GiB(3.0%)  tps: 1,234  tflops: 1.20  mfu: 3.1%"


def parse_line(text: str) -> ParsedLine | None:
    """Return what a line says by itself; None if it has no metric."""
    found = LineParser().parse(text)
    return found if found is not None and found.values and not found.candidate else None


def values_of(text: str) -> dict[str, float] | None:
    line = parse_line(text)
    return None if line is None else line.values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Hugging Face, before and since version 5
        (
            "{'loss': 0.5, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': 0.1}",
            ParsedLine(HUGGING_FACE, epoch=0.1, has_exact_epoch=True),
        ),
        (
            "{'loss': '0.5', 'grad_norm': '1.25', 'learning_rate': '5e-05', 'epoch': '0.1'}",
            ParsedLine(HUGGING_FACE, epoch=0.1, has_exact_epoch=True),
        ),
        ("{'eval_loss': 0.4, 'epoch': 1.0}", ParsedLine({"eval_loss": 0.4}, None, None, 1, True, True)),
        ('{"step": 10, "loss": 0.7}', ParsedLine({"loss": 0.7}, step=10)),
        (
            "step 100: {'loss': tensor(0.25, device='cuda:0'), 'acc': np.float64(0.5)}",
            ParsedLine({"loss": 0.25, "acc": 0.5}, step=100),
        ),
        (
            'json_stats: {"_type": "val_epoch", "epoch": "1/10", "top1_err": 60.5}',
            ParsedLine({"val/top1_err": 60.5}, None, None, 1, True, True),
        ),
        # how many steps a validation has, a time with the line of a file
        ("Epoch: 1/5 Train steps: 9 Val steps: 2 1.0s loss: 0.5", ParsedLine({"loss": 0.5}, epoch=1)),
        ("[0101 12:00:00 @monitor.py:467] GlobalStep: 500, loss: 0.5", ParsedLine({"loss": 0.5}, 500)),
        # functions, a dash, Chinese
        (
            "Loss_D: 1.5\tD(x): 0.5\tD(G(z)): 0.25 / 0.75\tseen: 3 / 4",
            ParsedLine({"Loss_D": 1.5, "D_x": 0.5, "D_G_z": 0.25, "D_G_z_2": 0.75}),
        ),
        ("epoch 3 loss - 6.5", ParsedLine({"loss": 6.5}, epoch=3)),
        ("accuracy: 0.5 - 3s - loss: 1.5", ParsedLine({"accuracy": 0.5, "loss": 1.5})),
        ("第3轮 损失：0.5", ParsedLine({"损失": 0.5}, epoch=3)),
        # tqdm
        (f" 12%|█▏   | {BAR}, loss=0.5]", ParsedLine({"loss": 0.5}, step=12, total=100)),
        (f"Training a model of many words:  12%|#2   | {BAR}, loss=0.5]", ParsedLine({"loss": 0.5}, 12, 100)),
        ("12it [00:01,  9.9it/s, loss=0.5]", ParsedLine({"loss": 0.5}, step=12, total=0)),
        # Lightning: a bar of tqdm, and one of Rich
        (f"Epoch 3:  12%|█▏  | {BAR}, v_num=0, train_loss=0.5]", ParsedLine({"train_loss": 0.5}, 12, 100, 3)),
        (
            "Epoch 3/9 ━━━━━━╸━━━ 12/100 0:00:01 • 0:00:08 9.90it/s v_num: 0.000 train_loss: 0.5",
            ParsedLine({"train_loss": 0.5}, 12, 100, 3),
        ),
        # What Rich's bar overwrote on a terminal
        (
            "Epoch 3/9 ━━━ 20/20 0:00:01 9.90it/s train_loss: 0.5`Trainer.fit` stopped: `max_epochs=4` reached.",
            ParsedLine({"train_loss": 0.5}, 20, 20, 3),
        ),
        # Keras
        (
            "400/400 ━━━━━━━━━━━━━━━ 3s 7ms/step - accuracy: 0.9 - loss: 0.5 - val_loss: 0.6",
            ParsedLine({"accuracy": 0.9, "loss": 0.5, "val_loss": 0.6}, 400, 400),
        ),
        ("Epoch 3/10 - 12s - loss: 0.5", ParsedLine({"loss": 0.5}, epoch=3)),
        # loops of torch
        ("epoch 3 | loss 0.5 | acc 91.2%", ParsedLine({"loss": 0.5, "acc": 91.2}, epoch=3)),
        ("[GPU0] Epoch 3 | Batchsize: 32 | Steps: 4 | Loss: 0.5", ParsedLine({"Loss": 0.5}, epoch=3)),
        ("step 100 loss 0.5", ParsedLine({"loss": 0.5}, step=100)),
        ("Epoch [3/10], Step [100/600], Loss: 0.5", ParsedLine({"Loss": 0.5}, 100, 600, 3)),
        ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.3", ParsedLine({"Loss": 2.3}, 640, 60000, 1)),
        (
            "Test set: Average loss: 0.0571, Accuracy: 9812/10000 (98%)",
            ParsedLine({"test/loss": 0.0571, "test/Accuracy": 0.9812}, held_out=True),
        ),
        ("loss: 2.3  [   64/60000]", ParsedLine({"loss": 2.3}, 64, 60000)),
        ("[2/5][100/1583]\tLoss_D: 1.7\tLoss_G: 5.4", ParsedLine({"Loss_D": 1.7, "Loss_G": 5.4}, 100, 1583, 2)),
        ("step 0: train loss 4.2, val loss 4.3", ParsedLine({"train_loss": 4.2, "val_loss": 4.3}, step=0)),
        (
            "epoch 1  train loss 0.9 acc 0.6  val loss 0.7 acc 0.8  3,582 images/s",
            ParsedLine({"train_loss": 0.9, "acc": 0.6, "val_loss": 0.7, "val_acc": 0.8}, epoch=1),
        ),
        ("Validation Loss: 0.123", ParsedLine({"validation_loss": 0.123}, held_out=True)),
        ("episode 7 reward: -12.5", ParsedLine({"reward": -12.5}, step=7)),
        # trainers
        (
            f"[titan] {STAMP} - root - INFO - {TORCHTITAN}",
            ParsedLine(
                {"loss": 8.1025, "grad_norm": 1.2, "memory": 1.22, "tps": 1234, "tflops": 1.2, "mfu": 3.1}, step=1
            ),
        ),
        (
            "Train: 3 [ 100/ 400 ( 25%)]  Loss: 6.9 (6.95)  Time: 0.5s, 200.1/s  LR: 1.000e-05  Data: 0.010 (0.02)",
            ParsedLine({"Loss": 6.9, "Time": 0.5, "LR": 1e-05, "Data": 0.01}, 100, 400, 3),
        ),
        (
            "Test: [  10/10]  Time: 0.4 (0.4)  Loss:   6.9 (6.9)  Acc@1:   2.5 ( 2.0)",
            ParsedLine({"test/Time": 0.4, "test/Loss": 6.9, "test/Acc@1": 2.5}, 10, 10, held_out=True),
        ),
        (
            "Epoch: [0]  [  10/1000]  eta: 0:10:00  lr: 0.1  loss: 6.9 (6.95)  acc1: 1.0 (1.0)",
            ParsedLine({"lr": 0.1, "loss": 6.9, "acc1": 1.0}, 10, 1000, 0),
        ),
        (
            "11/27 22:00:00 - mmengine - INFO - Epoch(train) [1][10/100]  lr: 1.0e-02  eta: 0:00:10  loss: 2.3",
            ParsedLine({"lr": 0.01, "loss": 2.3}, 10, 100, 1),
        ),
        (
            "11/27 22:00:00 - mmengine - INFO - Epoch(val) [1][10/10]    accuracy/top1: 80.5",
            ParsedLine({"val/accuracy/top1": 80.5}, 10, 10, 1, held_out=True),
        ),
        (
            "[11/27 22:00:00 d2.utils.events]:  eta: 0:10:00  iter: 19  total_loss: 1.2  lr: 0.001  max_mem: 2000M",
            ParsedLine({"total_loss": 1.2, "lr": 0.001, "max_mem": 2e9}, step=19),
        ),
        ("[10]\ttrain-rmse:0.34\teval-rmse:0.45", ParsedLine({"train-rmse": 0.34, "eval-rmse": 0.45}, step=10)),
        (
            "2026-11-27 22:00:00 | INFO | train | epoch 001:    100 / 1000 loss=9.8, ppl=900, lr=0.001",
            ParsedLine({"loss": 9.8, "ppl": 900, "lr": 0.001}, 100, 1000, 1),
        ),
        (f"[INFO|trainer.py:123] {STAMP} >> loss = 0.5", ParsedLine({"loss": 0.5})),
    ],
)  # fmt: skip
def test_lines_of_trainers_have_metrics(text: str, expected: ParsedLine) -> None:
    assert parse_line(text) == expected


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("loss_weight", (False, False, False)),
        ("cross-entropy", (True, False, False)),
        ("Acc@1", (True, False, False)),
        ("valAcc", (True, True, False)),
        ("vallossy", (False, False, False)),
        ("valid/max_steps", (False, True, True)),
        ("loss_per_epoch", (True, False, False)),
        ("num_epochs", (False, False, True)),
    ],
)
def test_words_of_a_name_say_what_it_is(name: str, kinds: tuple[bool, bool, bool]) -> None:
    assert (is_result(name), is_held_out(name), is_position(name)) == kinds


@pytest.mark.parametrize("text", ["loss: nan", "{'loss': nan}", '{"loss": NaN}', "loss=inf", "loss=-inf, step=3"])
def test_values_that_are_not_finite_are_kept(text: str) -> None:
    assert list(values_of(text) or ()) == ["loss"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        # prose
        "The best loss: 0.3 was found after a long search, saving the model",
        "Accuracy of the network on the 10000 test images: 54 %",
        "Metric val_loss improved by 0.1 >= min_delta = 0.0. New best score: 0.5",
        "Epoch 1: val_loss improved from inf to 0.51, saving model to best.keras",
        "Epoch 3, global step 100: 'val_loss' reached 0.51, saving model to '/x/epoch=3-val_loss=0.51.ckpt' as top 1",
        "Loaded 3 losses and 2 accuracies",
        "map: yes",
        # arguments and configurations
        "Namespace(lr=0.1, loss='l1', epochs=10, seed=1, loss_weight=0.5)",
        "TrainingArguments(learning_rate=5e-05, num_train_epochs=3, seed=42, label_smoothing_factor=0.0)",
        "{'learning_rate': 0.1, 'batch_size': 32, 'epochs': 10, 'loss_weight': 0.3}",
        '{"hidden_dropout_prob": 0.1, "num_labels": 2, "loss_type": "ce"}',
        "seed=1, dropout=0.1, warmup=3, f1=0",
        "learning_rate=5e-05,",
        "loss_scale=128,",
        "lr: 0.1",
        "+ python train.py --loss 0.5 --lr=0.1",
        "python train.py --loss 0.5 --target-acc=0.9",
        # versions, dates, paths, addresses
        "map: 2.1.0",
        "accuracy: 2026-11-27",
        "loss: 12:30:01",
        "/data/loss=0.5/x",
        "saved to runs/epoch=3-loss=0.5.pt",
        "https://host/?loss=0.5&acc=3",
        # code, tracebacks, warnings
        "    loss = 0.5 * x",
        '  File "train.py", line 12, in loss',
        "ValueError: loss: 0.5",
        "torch.cuda.OutOfMemoryError: loss=3",
        "UserWarning: loss=0.5",
        "2026-11-27 22:00:00 ERROR loss: 0.5",
        # what belongs to other programs
        "wandb: loss 0.5",
        "Downloading: 100%|██████████| 12/12 [00:01<00:00, 9it/s]",
        "Map: 100%|██████████| 60000/60000 [00:01<00:00, 9000 examples/s]",
        "error: 1",
        "0 errors, 3 warnings",
    ],
)
def test_other_lines_have_none(text: str) -> None:
    assert parse_line(text) is None


def test_line_that_is_too_long_has_none() -> None:
    for text in ("loss: 1", "{'loss': 1}"):
        assert values_of(text.ljust(MAX_LINE_LENGTH)) == {"loss": 1}
        assert values_of(text.ljust(MAX_LINE_LENGTH + 1)) is None


def test_line_with_too_many_numbers_has_none() -> None:
    values = {f"loss_{number}": 0.5 for number in range(MAX_NUMBERS + 1)}
    text = " ".join(f"{name}={value}" for name, value in values.items())
    assert values_of(text) is None and values_of(text.rpartition(" ")[0]) is not None


@pytest.mark.parametrize("pair", ["{}={}%, ", "val {}: {}, ", "{} {} "])
def test_line_of_many_numbers_has_none_without_pairs_of_one_form(pair: str) -> None:
    pairs = [pair.format(f"loss_{number}", 0.5) for number in range(MAX_FREE_NUMBERS + 1)]
    assert values_of("".join(pairs)) is None and len(values_of("".join(pairs[:-1])) or ()) == MAX_FREE_NUMBERS


def test_names_of_one_line_may_be_many() -> None:
    values = {f"loss_{number}": number / 2 for number in range(MAX_NUMBERS)}
    assert values_of(str(values)) == values
    for form, joint in (("{}={}", " "), ("{}: {}", ", "), ("{}:{}", " - ")):
        text = joint.join(form.format(name, value) for name, value in list(values.items())[1:])
        line = parse_line(f"step 3 - {text}")
        assert line is not None and line.step == 3 and {"loss_0": 0.0, **line.values} == values


def test_object_of_more_numbers_has_the_first_ones() -> None:
    values, parser = {f"loss_{number}": number / 2 for number in range(MAX_NUMBERS + 1)}, LineParser()
    line = parser.parse(str(values))
    assert line is not None and list(line.values) == list(values)[:-1] and parser.has_skipped


# Cost

PIECES = [
    "a", " ", "1", "[", "{", "(", "=", ":", "'", '"', "/", "|", ",", ".", "-", "_", "\t", "é", "loss", "loss ", "loss=",
    "loss: 1 ", "loss=1,", "epoch", "epoch ", "step ", "1/2 ", "1/2 [", "[1/2", "1,234", "1e", "{'loss': ", "train ",
    "%|", "lossloss_", "a.b/", "tensor(", "INFO ", "2026-11-27 ", "'a': 1, ", "--", "nan", "Epoch(", "[1][", "avg ",
]  # fmt: skip


def cost_of(text: str) -> float:
    """Return the CPU time of reading a line, in seconds; the least of three."""
    costs = []
    for _ in range(3):
        began = time.process_time()
        LineParser().parse(text)
        costs.append(time.process_time() - began)
    return min(costs)


# An unloaded core takes less than 1 ms. One backtracking pattern would take seconds.
@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("form", ["loss {}", "{{'loss': 1, {}}}", "loss {}=", "loss 1/2 [{}", "INFO {}"])
def test_line_of_any_content_is_read_quickly(piece: str, form: str) -> None:
    text = form.format((piece * MAX_LINE_LENGTH)[: MAX_LINE_LENGTH - len(form)])
    assert len(text) <= MAX_LINE_LENGTH
    assert cost_of(text) < 0.02


def calls_of(text: str) -> int:
    """Return the number of calls and returns while a line is read."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        LineParser().parse(text)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    "pair", ["loss{}: 1, ", "a{}=1 ", "Alpha beta gamma delta loss eps {} ", "val [x{}=3] ", "{}/2 "]
)
def test_calls_are_bounded_by_the_numbers_of_a_line(pair: str) -> None:
    assert calls_of("step 1 " + "".join(pair.format(number) for number in range(100))) < 250 * 100
    assert calls_of("loss 1 " + "a, " * 1000) < 200


# Forms that cost most
@pytest.mark.parametrize(
    "pair",
    [
        '"key{}": 1, ', '"key{}": "1", ', "'k{}Loss': tensor(1), ", "name_{} time (ms): 1 | ", "loss/name_{}: 1 | ",
        "loss at step {}: 1 ", "before{} {{ ", "w{}: {{'loss': 1}}, ", "第{}轮 ", "{}:1:1 ",
    ],
)  # fmt: skip
def test_calls_are_bounded_for_the_longest_lines(pair: str) -> None:
    for end in (MAX_LINE_LENGTH - 20, 50 * len(pair)):
        text = "".join(pair.format(number) for number in range(1000))[:end]
        assert calls_of("{" + text.rpartition(", ")[0] + "}" if pair[0] in "\"'" else text) < 12_000


# Whatever the separators and the prefix are

NAMES = st.sampled_from(["loss", "train_loss", "val_loss", "accuracy", "mIoU", "eval/acc", "top1_acc", "Loss_D", "ppl"])
BESIDE = st.sampled_from(["foo", "grad_norm", "alpha_1", "momentum_now", "kl", "q_value", "Zeta"])
NUMBERS = st.floats(-1e6, 1e6).map(lambda value: round(value, 4))
PREFIXES = st.sampled_from([
    "", f"{STAMP} - root - INFO - ", "INFO:root:", "[11/20 10:00:00] ", "[2026-11-20 10:00:10,123] [INFO] ",
    "I1120 10:00:26.230209 140110937163584 train.py:214] ", f"{STAMP} INFO train.py:12 ", "[INFO|trainer.py:3] >> ",
])  # fmt: skip
POSITIONS = st.sampled_from(
    ["step 10", "step: 10", "iter 10/500", "[ 10/ 500]", "iteration 10", "steps=10", "Step [10/500]"]
)


@given(
    PREFIXES, POSITIONS, NAMES, NUMBERS, BESIDE, NUMBERS,
    st.sampled_from([": ", "=", " = ", ":", " -> ", "： "]), st.sampled_from([", ", " | ", "; ", "\t", "  ", " - "]),
)  # fmt: skip
def test_pair_is_found_with_its_value_in_any_form(
    prefix: str, position: str, name: str, value: float, beside: str, other: float, sign: str, joint: str
) -> None:
    line = parse_line(f"{prefix}{position}{joint}{name}{sign}{value:.4f}{joint}{beside}{sign}{other:.4f}")
    assert line is not None and line.step == 10
    assert line.values[name] == pytest.approx(value) and line.values[beside] == pytest.approx(other)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("loss: 0,523", {"loss": 0.523}),
        ("loss: I1120, acc: 1", {"acc": 1}),
        ("loss: 1,234.5", {"loss": 1234.5}),
        ("loss: 0,123,456", {"loss": 123456}),
        ("step 2k loss 0.5", {"loss": 0.5}),
        ("[5]\ttrain-auc:0.9+0.01\ttest-auc:0.8+0.02", {"train-auc": 0.9, "test-auc": 0.8}),
        ("[D loss: 0.6] [G loss: 1.2]", {"d_loss": 0.6, "g_loss": 1.2}),
        ("train: loss=1, acc=2 val: loss=3, acc=4", {"loss": 1, "acc": 2, "val/loss": 3, "val/acc": 4}),
        ("loss 0.5 time 0.412s mem 5123MB", {"loss": 0.5, "time": 0.412, "mem": 5123}),
        ("DirectMap4k: 28672 kB", None),
    ],
)  # fmt: skip
def test_forms_of_numbers_and_names(text: str, values: dict[str, float] | None) -> None:
    assert values_of(text) == values


OTHER_PROGRAMS = (
    "ls -l /usr/bin", "ls -lR /usr/share", "git help -a", "pip list", "df -h", "mount", "ps aux", "free",
    "cat /proc/meminfo", "cat /proc/self/status", f"{sys.executable} -X importtime -c 'import asyncio, http.server'",
    f"{sys.executable} -m cProfile -c 'import email.message'", f"{sys.executable} -m pytest --help",
    f"{sys.executable} -m timeit -n 10 pass", "gcc -ftime-report -x c -fsyntax-only /dev/null",
)  # fmt: skip


def test_output_of_other_programs_has_hardly_any_name_and_no_result() -> None:
    num_lines, names = 0, set[str]()
    for words in map(shlex.split, OTHER_PROGRAMS):
        if shutil.which(words[0]) is None:
            continue
        done = subprocess.run(words, capture_output=True, text=True, check=False, errors="replace")
        lines, parser = (done.stdout + done.stderr).splitlines()[:600], OutputMetrics()
        num_lines += len(lines)
        names |= {point.name for line in lines for point in parser.feed(line)} | {
            point.name for point in parser.finish()
        }
    assert num_lines >= 2000
    assert len(names) <= 5 and not any(map(is_result, names))
