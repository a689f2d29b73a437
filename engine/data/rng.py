"""Fork the global random generators: seed them per image or batch, then restore them.

Transforms and user code draw from the global generators. Restoring their state keeps the model's dropout independent of
the input pipeline.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import SupportsInt

import numpy as np
import torch

SeedFunction = Callable[[SupportsInt], None]


@contextmanager
def fork_torch_rng() -> Iterator[SeedFunction]:
    """Fork torch's CPU generator, the only one that torchvision draws from, and yield a function that seeds it."""
    with torch.random.fork_rng(devices=[]):
        yield _seed_torch


@contextmanager
def fork_all_rngs() -> Iterator[SeedFunction]:
    """Fork the generators of torch (CPU), Python and NumPy for user code, and yield a function that seeds them."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield _seed_all
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def single_torch_thread() -> Iterator[None]:
    """Limit torch to one thread, as in a DataLoader worker: the last bits of a sum depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _seed_torch(bits: SupportsInt) -> None:
    # torch.manual_seed would also seed the CUDA generators.
    torch.default_generator.manual_seed(int(bits))


def _seed_all(bits: SupportsInt) -> None:
    _seed_torch(bits)
    random.seed(int(bits))
    np.random.seed(int(bits) % 2**32)
