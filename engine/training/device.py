"""Opens the device of a rank and checks that it is the one that was planned."""

from __future__ import annotations

import os

import torch

from engine.config.schema import Config
from engine.distributed.node_plan import Plan
from engine.distributed.rank_env import Seat
from engine.models.precision import problems_of_precision, set_tf32
from engine.utils.errors import UsageError
from engine.utils.process import keep_freed_memory


def _open_device(config: Config, plan: Plan, seat: Seat) -> torch.device:
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
                f"torch {torch.__version__} cannot use the GPUs that the driver shows; train with --gpus cpu",
            )
        device = torch.device("cuda", plan.place(seat.local_rank))
        torch.cuda.set_device(device)
        for place in plan.places(seat.local_rank):
            check_device(plan.devices[place], plan.parents[place], cuda_uuid(torch.device("cuda", place)))
    if problems := problems_of_precision(config.precision, device):
        raise UsageError(problems)
    set_tf32(config.precision)
    return device


class WrongDeviceError(RuntimeError):
    """CUDA gave a rank another GPU than the one that was chosen for it."""


def cuda_uuid(device: torch.device) -> str:
    """The UUID of the GPU that CUDA takes for this device, without what it begins with."""
    return str(torch.cuda.get_device_properties(device).uuid)


def check_device(wanted: str, parent: str | None, given: str) -> None:
    """Raises WrongDeviceError unless CUDA gave what was wanted. CUDA may tell an instance by the GPU that it is of."""
    if not any(uuid is not None and uuid.split("-", 1)[-1] == given for uuid in (wanted, parent)):
        raise WrongDeviceError(
            f"CUDA gave this rank the GPU {given}, and {wanted} was chosen for it: the driver's order of GPUs changed, "
            "or something set CUDA_VISIBLE_DEVICES in between; start again"
        )
