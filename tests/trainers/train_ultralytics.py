"""Train a classifier with ultralytics, from a model file and images made here."""

# Needs: ultralytics
import os
import tempfile
from pathlib import Path
from typing import Any

from logged_values import SEED, LoggedValues

MODEL = """\
nc: 2
backbone:
  - [-1, 1, Conv, [8, 3, 2]]
  - [-1, 1, Conv, [8, 3, 2]]
head:
  - [-1, 1, Classify, [nc]]
"""


def make_images(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(SEED)
    for part, count in (("train", 8), ("val", 4)):
        for label, brightness in (("dark", 0), ("light", 128)):
            images = folder / part / label
            images.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 128, (32, 32, 3), dtype=np.uint8) + brightness
                Image.fromarray(pixels.astype(np.uint8)).save(images / f"{number}.png")


def main(logged: LoggedValues) -> None:
    with tempfile.TemporaryDirectory() as work:
        # It keeps its settings in that folder, and asks no server.
        os.environ |= {"YOLO_CONFIG_DIR": work, "YOLO_OFFLINE": "true"}
        from ultralytics import YOLO, settings
        from ultralytics.models.yolo.classify import ClassificationTrainer

        # Otherwise it logs to each of these libraries that is installed.
        settings.update(mlflow=False, wandb=False, tensorboard=False, raytune=False)

        class RecordedTrainer(ClassificationTrainer):
            def save_metrics(self, metrics: dict[str, Any]) -> None:
                super().save_metrics(metrics)
                # Its CSV has six digits.
                logged.add("tiny", {name: f"{value:.6g}" for name, value in metrics.items()}, self.epoch + 1)

        model, data = Path(work, "tiny-cls.yaml"), Path(work, "data")
        model.write_text(MODEL)
        make_images(data)
        YOLO(model, task="classify").train(
            RecordedTrainer,
            data=str(data),
            epochs=5,
            imgsz=32,
            batch=4,
            workers=0,
            device="cpu",
            seed=SEED,
            amp=False,
            plots=False,
            project=str(logged.folder),
            name="tiny",
        )
    logged.add_parameters("tiny", {"epochs": 5, "imgsz": 32, "batch": 4, "seed": SEED, "device": "cpu"})
