"""The helper process of `gputrain doctor` that imports torch: versions, then whether it can initialize CUDA."""

from __future__ import annotations

from engine.base.helper_process import ParentPipe
from engine.jobs.doctor.software import CudaInfo, Libraries
from engine.train.distributed.failures import find_cause


def main(parent: ParentPipe) -> None:
    """Send the versions of torch and torchvision, then whether torch can use the GPUs."""
    parent.send(find_libraries())
    parent.send(find_cuda())


def find_libraries() -> Libraries:
    """Return the versions of torch and torchvision, or why an import fails."""
    try:
        import torch
        import torchvision
    except Exception as error:
        return Libraries(error=find_cause(error).reason)
    return Libraries(versions={"torch": torch.__version__, "torchvision": torchvision.__version__})


def find_cuda() -> CudaInfo:
    """Initialize CUDA, and return what torch is built for."""
    import torch
    import torch.distributed as dist

    if torch.version.cuda is None:
        return CudaInfo()
    has_nccl, error = dist.is_available() and dist.is_nccl_available(), ""
    try:
        torch.cuda.init()
    except Exception as failure:
        error = find_cause(failure).reason
    return CudaInfo(cuda=torch.version.cuda, has_nccl=has_nccl, error=error)
