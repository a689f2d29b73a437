"""The command lines of before the tree: each still works, or is refused with a hint at its new form, which works."""

from __future__ import annotations

import shlex

import pytest

from engine.utils.exit_codes import ExitCode
from support.command_lines import parse_line

OLD_COMMANDS = [
    *("run", "config", "sweep", "lr-find", "data", "pack", "models", "summary", "bench", "runs list", "runs tag"),
    *("runs note", "runs rename", "runs archive", "runs unarchive", "runs delete", "runs restore", "runs trash"),
    *("runs better", "attach", "logs", "stop", "resume", "profile", "queue", "queue hold", "queue release"),
    *("queue cancel", "queue move", "queue priority", "queue resume", "compare", "predict", "evaluate"),
    *("export", "report", "plot", "inspect", "sync", "gpus", "doctor", "notify test"),
]
# Old line, what its refusal names, new line.
REFUSED = [
    ("run digits --wait", "--queue", "run digits --queue"),
    ("run digits --gpus free:2 --wait --detach", "--queue", "run digits --gpus free:2 --queue --detach"),
    ("config --describe", "gputrain config describe", "config describe"),
    ("config --describe optim.lr loss", "gputrain config describe", "config describe optim.lr loss"),
    ("config digits --wait", "--queue", "config digits --queue"),
    (
        "sweep digits optim.lr=0.1,0.2 --metric val_loss=low",
        "--minimize",
        "sweep digits optim.lr=0.1,0.2 --minimize val_loss",
    ),
    ("sweep digits optim.lr=0.1,0.2 --metric f1", "--maximize", "sweep digits optim.lr=0.1,0.2 --maximize f1"),
    ("sweep digits optim.lr=0.1,0.2 --seed 3", "--sampler-seed", "sweep digits optim.lr=0.1,0.2 --sampler-seed 3"),
    ("sweep --resume digits-sweep", "gputrain sweep resume NAME", "sweep resume digits-sweep"),
    ("lr-find digits --wait", "--queue", "lr-find digits --queue"),
    ("data digits --part val", "--split", "data digits --split val"),
    ("data digits --images 4 -o a.png", "--per-class", "data digits --per-class 4 -o a.png"),
    ("pack photos -o shards --max-side 500", "gputrain data pack", "data pack photos -o shards --max-side 500"),
    ("pack photos -o shards --workers 4", "gputrain data pack", "data pack photos -o shards --threads 4"),
    ("summary digits --model cnn", "gputrain models show", "models show digits --model cnn"),
    (
        "summary digits --batch-size 8 --features",
        "gputrain models show",
        "models show digits --forward-batch 8 --stages",
    ),
    ("bench digits --strong", "--scaling strong", "bench digits --scaling strong"),
    ("bench digits --limit", "--synthetic-data", "bench digits --synthetic-data"),
    ("runs --limit 3", "--count", "runs -n 3"),
    ("runs list --limit 3 failed", "--count", "runs list --count 3 failed"),
    ("runs restore a --name b", "gputrain runs restore RUN NAME", "runs restore a b"),
    ("profile a --steps 10", "gputrain runs profile a", "runs profile a --steps 10"),
    ("profile a --stored --json", "gputrain runs profile a", "runs profile a --stored --json"),
    ("queue cancel a", "gputrain stop a", "stop a"),
    ("predict a b.jpg --device cuda:1", "--gpus", "predict a b.jpg --gpus 1"),
    ("predict a b.jpg --raw", "--no-ema", "predict a b.jpg --no-ema"),
    ("evaluate a --part train", "--split", "evaluate a --split train"),
    ("evaluate a --device cpu", "--gpus", "evaluate a --gpus cpu"),
    ("evaluate a --raw", "--no-ema", "evaluate a --no-ema"),
    ("inspect a --list labels --limit 5", "gputrain evaluate a --list", "evaluate a --list label-issues -n 5"),
    ("inspect a --cell cat dog --again", "gputrain evaluate a --list", "evaluate a --cell cat dog --again"),
    ("export a --raw", "--no-ema", "export a --no-ema"),
    ("export a --images 8", "--check-images", "export a --check-images 8"),
    ("plot a -o b.pdf --metric lr", "gputrain report a -o", "report a -o b.pdf --metric lr"),
    ("sync a --to mlflow --follow", "gputrain runs sync", "runs sync a --service mlflow -f"),
    ("gpus --watch --samples 3", "--count", "gpus --watch -n 3"),
    ("notify test digits", "gputrain doctor --send-test-message", "doctor digits --send-test-message"),
]
KEPT = [
    "run",
    "run flowers.yaml --headless --name job --resume",
    "run digits --detach --after a,b --share 0.5 optim.lr=0.1",
    "run digits --ngpu 2 --json --take-over --trust-owner --trust-code",
    "run digits --dry-run",
    "config digits --sources optim.lr=0.1",
    "config digits --diff --json",
    "sweep digits optim.lr=log:1e-3..0.3 --trials 9 --parallel 2 --sampler tpe --pruner asha --name a --detach",
    "lr-find digits --from 1e-6 --to 1 --steps 50 --set --pick valley",
    "data digits --augmented --dataset digits --force --json",
    "models resnet --pretrained --source timm --json",
    "bench digits --ranks-list 1,2 --repeats 3 --epochs 2 --json",
    "runs",
    "runs list",
    "runs 'val_accuracy>0.9' -tag=old --sort lr --reverse --columns name,lr --all --quiet",
    "runs tag a b +night -old",
    "runs note a twice the batch",
    "runs rename a b --take-over",
    "runs archive a b",
    "runs unarchive a",
    "runs delete a b --yes",
    "runs restore a",
    "runs trash --empty --yes",
    "runs better f1 low",
    "attach",
    "attach a --low-bandwidth",
    "logs a --follow",
    "stop a --no-wait --trust-owner",
    "resume a --headless run.epochs=30",
    "resume a --detach --take-over",
    "queue",
    "queue hold a",
    "queue release a",
    "queue move a --first",
    "queue move a --before b",
    "queue priority a 3",
    "queue resume",
    "compare a b --baseline a --json",
    "predict a b.jpg --top 3 --checkpoint last",
    "evaluate a eval.tta=flip --json",
    "export a --format onnx -o exported --force",
    "report a b -o c.html --force",
    "gpus --watch --processes --links --interval 1 --record a.jsonl",
    "doctor digits --gpus 0,1 --json",
]


@pytest.mark.parametrize(("old", "hint", "new"), REFUSED, ids=[row[0] for row in REFUSED])
def test_old_line_is_refused_with_its_new_form(
    capsys: pytest.CaptureFixture[str], old: str, hint: str, new: str
) -> None:
    assert parse_line(shlex.split(old)) == ExitCode.USAGE_ERROR
    said = capsys.readouterr()
    assert said.out == ""
    assert "did you mean " in said.err
    assert hint in said.err
    assert parse_line(shlex.split(new)) == 0


@pytest.mark.parametrize("line", KEPT)
def test_old_line_still_parses(line: str) -> None:
    assert parse_line(shlex.split(line)) == 0


def test_table_has_every_old_command() -> None:
    lines = [line.split() for line in (*KEPT, *(row[0] for row in REFUSED))]
    named = {" ".join(words) for line in lines for words in (line[:1], line[:2])}
    assert {*OLD_COMMANDS} - named == set()
