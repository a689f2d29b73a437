"""Train with Keras on torch, with its CSV logger and its TensorBoard callback, which needs TensorFlow."""

# Needs: keras tensorflow-cpu tensorboard
import os
from typing import Any

import numpy as np
from logged_values import SEED, LoggedValues

os.environ["KERAS_BACKEND"] = "torch"
import keras


def main(logged: LoggedValues) -> None:
    class Recorder(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            values = dict(logs or {})
            logged.add("csv", values, epoch)
            for part in ("train", "validation"):
                prefix = "val_" if part == "validation" else ""
                names = ("loss", "mae")
                logged.add(f"events/{part}", {f"epoch_{name}": values[prefix + name] for name in names}, epoch)

    keras.utils.set_random_seed(SEED)
    (logged.folder / "csv").mkdir()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    inputs = np.random.default_rng(SEED).normal(size=(16, 4))
    targets = inputs.sum(1, keepdims=True)
    loggers = [
        keras.callbacks.CSVLogger(str(logged.folder / "csv" / "training.csv")),
        keras.callbacks.TensorBoard(str(logged.folder / "events")),
    ]
    model.fit(inputs, targets, validation_split=0.25, epochs=6, verbose=0, callbacks=[*loggers, Recorder()])
