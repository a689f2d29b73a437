"""Commands of other programs as their users type them: how each starts, and what `gputrain run -- COMMAND` finds in it.

`tests/trainers/test_commands.py` runs them in the environments of `support/trainers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support.trainers import SCRIPTS

COMMANDS = SCRIPTS / "commands"
# A tiny classifier: nothing is downloaded.
YOLO_MODEL = """\
nc: 2
backbone:
  - [-1, 1, Conv, [8, 3, 2]]
  - [-1, 1, Conv, [8, 3, 2]]
head:
  - [-1, 1, Classify, [nc]]
"""


def make_images(folder: Path) -> None:
    """Write a model of ultralytics, and two classes of small images."""
    import numpy as np
    from PIL import Image

    (folder / "tiny-cls.yaml").write_text(YOLO_MODEL)
    random = np.random.default_rng(0)
    for part in ("train", "val"):
        for label, brightness in (("dark", 0), ("light", 128)):
            images = folder / "data" / part / label
            images.mkdir(parents=True)
            for number in range(8):
                pixels = random.integers(0, 128, (32, 32, 3), dtype=np.uint8) + brightness
                Image.fromarray(pixels.astype(np.uint8)).save(images / f"{number}.png")


@dataclass(frozen=True)
class TrainerCommand:
    """A command line, and the metrics and parameters that are found. Without metrics it is a service, which is stopped.

    `environment` is the one that has its programs, "" for that of the tests. In `line`, SCRIPTS is the folder of the
    scripts, ENVIRONMENT that of the environment, PORT a free port, and STEPS the length of the training: `steps`, and
    far more where the command is stopped. The other line to compare with has `other` in place of `changed`.
    """

    environment: str
    line: str
    metrics: frozenset[str]
    steps: int = 0
    parameters: Mapping[str, object] = field(default_factory=dict)
    prepare: Callable[[Path], None] | None = None
    changed: str = ""
    other: str = ""


TRAINER_COMMANDS = {
    "lightning": TrainerCommand(
        "lightning", "python SCRIPTS/fit_lightning.py --lr 0.05 --max-epochs STEPS",
        frozenset({"train_loss", "val_loss"}), 4, {"lr": 0.05, "max_epochs": 4}, None, "--lr 0.05", "--lr 0.1",
    ),
    "transformers": TrainerCommand(
        "transformers",
        "python SCRIPTS/fit_transformers.py --output_dir output --learning_rate 1e-3 --max_steps STEPS --use_cpu"
        " --per_device_train_batch_size 4 --logging_steps 2 --eval_strategy steps --eval_steps 8",
        frozenset({"loss", "eval_loss", "grad_norm", "learning_rate"}), 32,
        {"learning_rate": 0.001, "max_steps": 32, "eval_strategy": "steps"}, None, "1e-3", "1e-2",
    ),
    "accelerate": TrainerCommand(
        "accelerate",
        "accelerate launch --cpu --num_processes 1 SCRIPTS/fit_accelerate.py --learning_rate 0.05 --num_epochs STEPS",
        frozenset({"loss", "accuracy"}), 4, {"learning_rate": 0.05, "accelerate.num_processes": 1}, None, "0.05", "0.1",
    ),
    "ultralytics": TrainerCommand(
        "ultralytics",
        "yolo classify train model=tiny-cls.yaml data=data epochs=STEPS imgsz=32 batch=4 workers=0 device=cpu amp=False"
        " project=out name=tiny lr0=0.01",
        frozenset({"train/loss", "val/loss", "metrics/accuracy_top1"}), 20,
        {"epochs": 20, "imgsz": 32, "lr0": 0.01}, make_images, "lr0=0.01", "lr0=0.02",
    ),
    "timm": TrainerCommand(
        "timm",
        "python ENVIRONMENT/train.py data --model test_vit --num-classes 2 --epochs STEPS --warmup-epochs 0 -b 4"
        " --val-split val --img-size 160 --device cpu --workers 1 --log-interval 1 --lr 0.01",
        frozenset({"train_loss", "eval_loss", "eval_top1", "lr"}), 8,
        {"model": "test_vit", "lr": 0.01, "epochs": 8}, make_images, "--lr 0.01", "--lr 0.02",
    ),
    "keras": TrainerCommand(
        "keras", "python SCRIPTS/fit_keras.py --lr 0.05 --epochs STEPS",
        frozenset({"loss", "mae", "val_loss", "val_mae"}), 5, {"lr": 0.05, "epochs": 5}, None, "0.05", "0.1",
    ),
    "torchtitan": TrainerCommand(
        "torchtitan", "python SCRIPTS/../train_torchtitan.py outputs values.json",
        frozenset({"loss_metrics/global_avg_loss", "grad_norm"}), 0,
    ),
    "sentence-transformers": TrainerCommand(
        "sentence-transformers", "python SCRIPTS/fit_sentence_transformers.py --lr 0.002 --steps STEPS",
        frozenset({"loss", "grad_norm"}), 40, {"lr": 0.002, "steps": 40}, None, "0.002", "0.001",
    ),
    "ddp": TrainerCommand(
        "", "torchrun --nproc-per-node 2 SCRIPTS/fit_ddp.py STEPS --batch_size 32 --lr 0.05",
        frozenset({"Loss", "clock"}), 16,
        {"torchrun.nproc_per_node": 2, "batch_size": 32, "lr": 0.05}, None, "0.05", "0.1",
    ),
    "uv": TrainerCommand(
        "uv", "uv run --offline SCRIPTS/fit_loop.py --lr 0.1 --steps STEPS", frozenset({"loss", "clock"}), 40,
        {"lr": 0.1, "steps": 40}, None, "0.1", "0.2",
    ),
    "c": TrainerCommand(
        "", "SCRIPTS/fit_c.sh --lr 0.1 --steps STEPS", frozenset({"loss", "clock"}), 40,
        {"lr": 0.1, "steps": 40}, None, "0.1", "0.2",
    ),
    "http": TrainerCommand("", "python -m http.server PORT --bind 127.0.0.1", frozenset(), 0, {"bind": "127.0.0.1"}),
}  # fmt: skip
