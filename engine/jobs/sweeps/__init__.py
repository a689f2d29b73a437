"""Sweeps: search the values of config keys with Optuna, each trial a run of its own.

`settings` validates what a sweep searches, `folder` holds its files, `study` is the Optuna study in them. `controller`
asks for trials, starts them as runs (`trial`) and tells their results; `status` reads a sweep for the screens.
"""

from typing import Literal

Sampler = Literal["tpe", "grid", "random"]
Pruner = Literal["median", "asha", "none"]
MAX_TRIALS = 100_000
MAX_PARALLEL = 1024
MAX_SEED = 2**32 - 1
