"""The device of a rank: initialize it, check that it is the planned one, and its random number generators."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from engine.base.errors import CodedError, UsageError, raise_if_any
from engine.base.process import keep_freed_memory
from engine.config.schema import Config
from engine.train.distributed.node_plan import NodePlan
from engine.train.distributed.rank_env import RankInfo
from engine.train.models.precision import precision_problems, set_tf32


def init_device(config: Config, plan: NodePlan, rank_info: RankInfo) -> torch.device:
    """Apply the cuDNN, determinism and TF32 settings and select the device of this rank. Raises UsageError."""
    torch.backends.cudnn.benchmark = config.device.cudnn_benchmark and not config.device.deterministic
    torch.backends.cudnn.deterministic = config.device.deterministic
    if config.device.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    device = torch.device("cpu")
    if not plan.on_gpu:
        keep_freed_memory()
    else:
        if not torch.cuda.is_available():
            raise UsageError.one(
                "device.gpus",
                f"torch {torch.__version__} cannot use the GPUs that the driver reports; train on the CPU with "
                "--gpus cpu",
                code="not-supported",
            )
        device = torch.device("cuda", plan.device_index(rank_info.local_rank))
        torch.cuda.set_device(device)
        for index in plan.device_indices(rank_info.local_rank):
            if not plan.devices[index].isdigit():
                check_device(plan.devices[index], plan.parent_uuids[index], cuda_uuid(torch.device("cuda", index)))
    raise_if_any([*precision_problems(config.precision, device)])
    set_tf32(config.precision, device, plan.capability)
    return device


class WrongDeviceError(CodedError):
    """CUDA assigned a rank another GPU than the planned one."""

    code = "gpu-not-found"


def cuda_uuid(device: torch.device) -> str:
    """Return the UUID of a CUDA device, without the prefix `GPU-` or `MIG-`."""
    return str(torch.cuda.get_device_properties(device).uuid)


def check_device(expected: str, parent: str | None, actual: str) -> None:
    """Check that a rank got the expected GPU or MIG instance, by UUID. Raises WrongDeviceError.

    For a MIG instance, CUDA may report the UUID of its parent GPU.
    """
    if not any(uuid is not None and uuid.split("-", 1)[-1] == actual for uuid in (expected, parent)):
        raise WrongDeviceError(
            f"CUDA assigned this rank GPU {actual} instead of {expected}: the driver's order of GPUs or "
            "CUDA_VISIBLE_DEVICES has changed; start the run again",
        )


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy, torch and CUDA. DataLoader workers need no seed: augmentation is seeded per image
    and epoch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every random number generator of this process, as tensors and plain values."""
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
