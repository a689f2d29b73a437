"""Train with Keras on torch, whose progress bar alone shows the metrics."""

import argparse
import os
import time

import numpy as np

os.environ["KERAS_BACKEND"] = "torch"
import keras


class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(arguments.lr), "mse", metrics=["mae"])
    inputs = np.random.default_rng(0).normal(size=(160, 4))
    targets = inputs.sum(1, keepdims=True)
    model.fit(inputs, targets, validation_split=0.25, epochs=arguments.epochs, batch_size=8, callbacks=[Slow()])


if __name__ == "__main__":
    main()
