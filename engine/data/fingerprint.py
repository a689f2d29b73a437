"""Fingerprint of the images of a dataset, by which a resumed run detects that they are not those of its checkpoint.

Each image source returns one per part. It depends neither on the folder of the dataset nor on rank or input pipeline.
`engine.training.checkpoint_writer` saves it, `engine.training.resume` compares it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

# A list of a million names would take more memory than their dataset leaves in a process.
CHUNK_NAMES = 1 << 14


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 digests of the file names, labels and file sizes of one part, in the order of its images.

    A digest is empty if the source does not have the property, or only after reading every image.
    """

    names: str = ""
    labels: str = ""
    sizes: str = ""


def hash_names(names: Iterable[str]) -> str:
    """Return the SHA-256 of the names, separated by null bytes, which no file name contains."""
    digest, remaining, separator = hashlib.sha256(), iter(names), b""
    while chunk := list(islice(remaining, CHUNK_NAMES)):
        digest.update(separator + os.fsencode("\0".join(chunk)))
        separator = b"\0"
    return digest.hexdigest()


def hash_integers(values: NDArray[np.integer]) -> str:
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()
