"""A copy of the training state in host memory, from which a checkpoint is written while training changes the state.

`checkpoint_writer` owns a `HostCopy`; `state_dict` passes the state dicts of model, EMA weights and optimizer to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.utils.errors import CodedError
from engine.utils.host import free_memory
from engine.utils.units import format_bytes

# Stays free for loader processes and other programs.
RESERVED_BYTES = 1 << 29
ALIGNMENT_BYTES = 64
NO_MEMORY = np.empty(0, dtype=np.uint8)
CUDA_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable of the CUDA runtime: pinned for every GPU

# Identifies the memory of a tensor: tied weights are two tensors in one memory.
Memory = tuple[int, torch.device, torch.dtype, torch.Size, tuple[int, ...]]


class NoHostMemoryError(CodedError):
    """The host has too little memory for a copy of the training state. The message says how much."""

    code = "out-of-memory"


class HostCopy:
    """One block of host memory of the size of a checkpoint, reserved for the first copy and reused by the next ones.

    Fresh memory costs more than the copy: 500 MB took 0.9 s at the first use and 0.15 s when reused, because of 122,000
    page faults. For a GPU the memory is pinned, which saves a second copy in the driver.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = NO_MEMORY

    def reserve(self, state: Mapping[str, Any]) -> None:
        """Allocate the memory for a copy of nested state dicts, unless it is there. Raises NoHostMemoryError."""
        size_bytes = sum(map(_aligned_bytes, _distinct_tensors(state).values()))
        if size_bytes <= self._memory.nbytes:
            return
        # Freed first, unless a copy is still in use.
        self._memory = NO_MEMORY
        free_bytes = free_memory()[0]
        if size_bytes + RESERVED_BYTES > free_bytes:
            raise NoHostMemoryError(
                f"a copy of the training state takes {format_bytes(size_bytes)} of host memory, and "
                f"{format_bytes(free_bytes)} are free",
            )
        try:
            self._memory = torch.empty(size_bytes, dtype=torch.uint8).numpy()
        except (RuntimeError, MemoryError) as error:
            # A limit of the address space.
            raise NoHostMemoryError(
                f"{format_bytes(size_bytes)} of host memory for a copy of the training state cannot be allocated",
            ) from error
        if self._device.type == "cuda":
            _pin(self._memory, self._device)

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return nested state dicts with all tensors copied and contiguous; wait until they are copied.

        The copies are valid until the next call. Raises NoHostMemoryError.
        """
        self.reserve(state)
        copies: dict[Memory, Tensor] = {}
        offset = 0
        for key, tensor in _distinct_tensors(state).items():
            copies[key] = _tensor_in(self._memory, offset, tensor)
            copies[key].copy_(tensor, non_blocking=True)
            offset += _aligned_bytes(tensor)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        copied: dict[str, Any] = map_tensors(state, lambda tensor: copies[memory_of(tensor)])
        return copied


def _pin(memory: NDArray[np.uint8], device: torch.device) -> None:
    """Pin memory where it is; `pin_memory` of torch would round its size up to a power of two.

    Memory that the driver does not pin stays as it is: copies to it are slower.
    """
    cudart, address = torch.cuda.cudart(), memory.ctypes.data
    if int(cudart.cudaHostRegister(address, memory.nbytes, CUDA_HOST_REGISTER_PORTABLE)) == 0:
        # When the last copy in it is gone, before it is freed: each copy refers to the array.
        weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
        return
    with suppress(RuntimeError):
        # The error stays in the CUDA runtime, and the next kernel launch would raise it.
        torch.ones(1, device=device)


def _distinct_tensors(state: Mapping[str, Any]) -> dict[Memory, Tensor]:
    """Return the tensors of nested state dicts, one for each memory."""
    tensors: dict[Memory, Tensor] = {}
    map_tensors(state, lambda tensor: tensors.setdefault(memory_of(tensor), tensor))
    return tensors


def _aligned_bytes(tensor: Tensor) -> int:
    """Return the bytes of a copy, rounded up so that the next one is aligned as torch aligns new tensors."""
    return -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _tensor_in(memory: NDArray[np.uint8], offset: int, like: Tensor) -> Tensor:
    """Return an uninitialized tensor in `memory` with a storage of its own: `torch.save` writes whole storages."""
    if like.numel() == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=offset).view(like.shape)


def map_tensors(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Return nested containers as new dicts, lists and tuples, with each tensor converted."""
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, convert) for key, item in value.items()}
    if isinstance(value, list):
        return [map_tensors(item, convert) for item in value]
    return tuple(map_tensors(item, convert) for item in value) if type(value) is tuple else value


def memory_of(tensor: Tensor) -> Memory:
    """Return what two tensors have in common if they are the same memory."""
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()
