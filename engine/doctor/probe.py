"""The helper process of `gputrain doctor` that imports torch: versions, then what its initialization of CUDA finds."""

from __future__ import annotations

from engine.distributed.failures import find_cause
from engine.doctor.software import CudaGpu, CudaInfo, TorchInfo
from engine.utils.codec import replace
from engine.utils.helper_process import ParentPipe


def main(parent: ParentPipe) -> None:
    """Send the versions of torch, then whether it can use the GPUs."""
    parent.send(torch_info())
    parent.send(cuda_info())


def torch_info() -> TorchInfo:
    """Return the versions and backends of this build of torch, or why its import fails."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        return TorchInfo(errors={"torch": find_cause(error).reason})
    has_nccl = dist.is_available() and torch.version.cuda and dist.is_nccl_available()
    info = TorchInfo(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
    )
    try:
        import torchvision
    except Exception as error:
        return replace(info, errors={"torchvision": find_cause(error).reason})
    return replace(info, torchvision=torchvision.__version__)


def cuda_info() -> CudaInfo:
    """Initialize CUDA, and return its GPUs and the architectures that torch has kernels for."""
    import torch

    if torch.version.cuda is None:
        return CudaInfo()
    try:
        torch.cuda.init()
    except Exception as error:
        return CudaInfo(error=find_cause(error).reason)
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = [CudaGpu(uuid=str(gpu.uuid), name=gpu.name, capability=(gpu.major, gpu.minor)) for gpu in properties]
    return CudaInfo(gpus=tuple(gpus), kernels=tuple(torch.cuda.get_arch_list()))
