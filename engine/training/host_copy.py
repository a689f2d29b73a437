"""A copy of the training state in host memory, from which a checkpoint is written while training changes the state.

`checkpoint_writer` owns a `HostCopy`; `state_dict` passes the state dicts of model, EMA weights and optimizer to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from engine.utils.host import format_bytes, free_memory

# Stays free for loader processes and other programs.
RESERVED_BYTES = 1 << 29

# Identifies the memory of a tensor: tied weights are two tensors in one memory.
Memory = tuple[int, torch.device, torch.dtype, torch.Size, tuple[int, ...]]


class NoHostMemoryError(Exception):
    """The host has too little memory for a copy of the training state. The message says how much."""


class HostCopy:
    """Host memory of the size of a checkpoint, allocated by the first copy and reused by the next ones.

    Fresh memory costs more than the copy: 500 MB took 0.9 s at the first use and 0.15 s when reused, because of 122,000
    page faults. For a GPU the memory is pinned, which saves a second copy in the driver.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []

    def copy(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return nested state dicts with all tensors copied and contiguous; wait until they are copied.

        The copies are valid until the next call. Raises NoHostMemoryError.
        """
        tensors: dict[Memory, Tensor] = {}
        map_tensors(state, lambda tensor: tensors.setdefault(memory_of(tensor), tensor))
        self._buffers = self._fitting_buffers(list(tensors.values()))
        copies = dict(zip(tensors, self._buffers, strict=True))
        for memory, tensor in tensors.items():
            copies[memory].copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        copied: dict[str, Any] = map_tensors(state, lambda tensor: copies[memory_of(tensor)])
        return copied

    def _fitting_buffers(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return a buffer for each tensor: that of the previous copy if it fits, else a new one."""
        old, self._buffers = self._buffers, []
        buffers = [
            old[index] if index < len(old) and _fits(old[index], tensor) else None
            for index, tensor in enumerate(tensors)
        ]
        del old
        new = [tensor for tensor, buffer in zip(tensors, buffers, strict=True) if buffer is None]
        if not new:
            return [buffer for buffer in buffers if buffer is not None]
        needed_bytes, free_bytes = sum(tensor.nbytes for tensor in new), free_memory()[0]
        if needed_bytes + RESERVED_BYTES > free_bytes:
            raise NoHostMemoryError(
                f"a copy of the training state takes {format_bytes(needed_bytes)} of host memory, and "
                f"{format_bytes(free_bytes)} are free"
            )
        pinned = self._device.type == "cuda"
        try:
            return [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) if buffer is None else buffer
                for tensor, buffer in zip(tensors, buffers, strict=True)
            ]
        except (RuntimeError, MemoryError) as error:
            # A limit of the address space, or of the memory that the driver can pin.
            raise NoHostMemoryError(
                f"{format_bytes(needed_bytes)} of host memory for a copy of the training state cannot be allocated"
            ) from error


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


def _fits(buffer: Tensor, tensor: Tensor) -> bool:
    return (buffer.dtype, buffer.shape) == (tensor.dtype, tensor.shape)
