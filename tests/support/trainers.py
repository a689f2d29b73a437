"""The trainers of others: the packages of each, and the script in `tests/trainers` that trains with it.

`tests/trainers/build.py` makes an environment for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "trainers"


@dataclass(frozen=True)
class Trainer:
    """A trainer: its packages besides torch, and its script. The first package has the version of the trainer."""

    requirements: tuple[str, ...]
    script: str

    @property
    def package(self) -> str:
        """The distribution whose version is that of the trainer."""
        return self.requirements[0]


TRAINERS = {
    "lightning": Trainer(("lightning", "tensorboard"), "train_lightning.py"),
    "transformers": Trainer(("transformers", "accelerate", "tensorboard"), "train_transformers.py"),
    "accelerate": Trainer(("accelerate", "tensorboard", "wandb"), "train_accelerate.py"),
    "ultralytics": Trainer(("ultralytics",), "train_ultralytics.py"),
    "timm": Trainer(("timm",), "train_timm.py"),
    # The TensorBoard callback of Keras writes with TensorFlow, whatever the backend.
    "keras": Trainer(("keras", "tensorflow-cpu", "tensorboard"), "train_keras.py"),
    "wandb": Trainer(("wandb",), "train_wandb.py"),
    "trackio": Trainer(("trackio",), "train_trackio.py"),
    # Its default store needs two more packages.
    "mlflow": Trainer(("mlflow-skinny", "sqlalchemy", "alembic"), "train_mlflow.py"),
    "torchtitan": Trainer(("torchtitan", "tensorboard"), "train_torchtitan.py"),
}


def python_of(folder: Path) -> Path:
    """Return the interpreter of an environment."""
    return folder / "bin" / "python"
