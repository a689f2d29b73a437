"""Checkpoints: all that training needs to go on as if it had not been interrupted, in one file.

Format 1 is a dict of plain values and tensors that `torch.load(weights_only=True)` reads:

    format, config, classes         what was trained, on what
    model, optimizer, scaler        their state dicts, the model's without any wrapper's prefix
    epoch, batch, step, skipped     the position: `batch` batches of `epoch` are done, `step` steps in all
    global_batch                    images of all ranks in one of those batches
    best_epoch, best_accuracy       of the evaluations so far, 0 and -1.0 before the first
    ranks                           for each rank: its random number generators, its running sums of the epoch, and
                                    the losses that no `step` event has told yet
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.files import link_file, replace_file, sync_folder
from engine.problems import UsageError

CHECKPOINT_FORMAT = 1


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of every random number generator of this process, as tensors and plain values."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    return {
        "python": [version, list(words), gauss],
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    stored = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": stored["key"].numpy().astype(np.uint32), "pos": stored["pos"]},
            "has_gauss": stored["has_gauss"],
            "gauss": stored["gauss"],
        }
    )
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


def save_checkpoint(state: Mapping[str, Any], folder: Path) -> Path:
    """Write `last.pt`; it is on the disk on return, and the one before holds until then. Raises OSError."""
    path = folder / "last.pt"
    try:
        folder.mkdir(exist_ok=True)
        replace_file(path, lambda file: torch.save({"format": CHECKPOINT_FORMAT, **state}, file), durable=True)
    except RuntimeError as error:
        # How torch's writer reports a disk that takes no more.
        raise OSError(str(error).splitlines()[0]) from error
    return path


def keep_checkpoint(folder: Path, epoch: int, *, best: bool, keep: int) -> None:
    """Give `last.pt` the name of the epoch that it ends, and `best.pt` where it is that; drop all but the newest
    `keep` epochs. Raises OSError."""
    link_file(folder / "last.pt", folder / f"epoch-{epoch:04d}.pt")
    if best:
        link_file(folder / "last.pt", folder / "best.pt")
    by_age = sorted(folder.glob("epoch-*.pt"), key=lambda path: int(path.stem.removeprefix("epoch-")))
    for old in by_age[:-keep]:
        old.unlink()
    sync_folder(folder)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Raises UsageError where the file is missing, damaged or of a later format."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        found = state["format"]
    except FileNotFoundError as error:
        raise UsageError.one(
            str(path), "there is no checkpoint to continue from; start the run anew under another name"
        ) from error
    except Exception as error:
        # Bytes that are no checkpoint bring any error out of the unpickler.
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError.one(str(path), f"is damaged or no checkpoint of gputrain: {reason}") from error
    if found != CHECKPOINT_FORMAT:
        raise UsageError.one(
            str(path), f"has format {found}, and this gputrain reads format {CHECKPOINT_FORMAT}; update it"
        )
    return state
