"""The copy of the training state in host memory: its content, its one block of memory, and too little of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.training import host_copy
from engine.training.host_copy import HostCopy, NoHostMemoryError
from support.messages import raises_problem

CPU = torch.device("cpu")


def copy_of(host: HostCopy, **tensors: Any) -> dict[str, Any]:
    return host.copy({"model": tensors})["model"]


def test_host_copy_reuses_its_memory_and_follows_changed_shapes() -> None:
    host, live = HostCopy(CPU), torch.arange(6.0)
    first = copy_of(host, a=live, b=torch.zeros(3))
    live += 1
    assert first["a"].tolist() == list(range(6)), "the copy does not change with the original"
    second = copy_of(host, a=live, b=torch.zeros(4))
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert (second["a"].tolist(), second["b"].shape) == ([1, 2, 3, 4, 5, 6], (4,))


def test_host_copy_keeps_tied_weights_tied_and_makes_tensors_contiguous() -> None:
    weight = torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    copied = copy_of(HostCopy(CPU), a=weight, b=weight.detach(), nested=[{0: (weight.flatten()[1:], "text", None)}])
    assert copied["a"].data_ptr() == copied["b"].data_ptr() != weight.data_ptr()
    assert copied["a"].is_contiguous()
    assert torch.equal(copied["a"], weight)
    tensor, *others = copied["nested"][0][0]
    assert (tensor.tolist(), others) == (weight.flatten()[1:].tolist(), ["text", None])


def test_host_copy_needs_no_memory_after_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    host, state = HostCopy(CPU), {"model": {"a": torch.arange(1000), "b": torch.ones(3)}}
    host.reserve(state)
    monkeypatch.setattr(host_copy, "free_memory", free_memory_of(0))
    assert [tensor.tolist() for tensor in host.copy(state)["model"].values()] == [list(range(1000)), [1, 1, 1]]


def test_host_copy_saves_each_tensor_alone(tmp_path: Path) -> None:
    copied = HostCopy(CPU).copy({"model": {"large": torch.zeros(1000), "half": torch.ones(3, dtype=torch.bfloat16)}})
    torch.save(copied["model"]["half"], tmp_path / "half.pt")
    assert (tmp_path / "half.pt").stat().st_size < 2000
    assert torch.equal(torch.load(tmp_path / "half.pt"), torch.ones(3, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_host_copy_on_gpu_pins_one_block_of_exact_size() -> None:
    host, device = HostCopy(torch.device("cuda", 0)), "cuda:0"
    first, second = torch.ones(3000, device=device), torch.zeros(5, dtype=torch.int64, device=device)
    allocator_before = torch.cuda.host_memory_stats()
    copied = copy_of(host, a=first, b=second)
    assert copied["a"].is_pinned()
    assert copied["b"].is_pinned()
    assert copied["b"].data_ptr() - copied["a"].data_ptr() == 12032, "4 x 3000, aligned to 64 bytes"
    assert host._memory.nbytes == 12032 + 64
    assert torch.cuda.host_memory_stats() == allocator_before
    address = copied["b"].data_ptr()
    del host, copied
    assert not torch.frombuffer((ctypes.c_byte * 8).from_address(address), dtype=torch.int8).is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_host_copy_works_if_driver_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    copied = copy_of(HostCopy(torch.device("cuda", 0)), a=torch.ones(3, device="cuda:0"))
    assert (copied["a"].tolist(), copied["a"].is_pinned()) == ([1, 1, 1], False)


def allocation_fails(*_: object, **__: object) -> Tensor:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def free_memory_of(size: int) -> Callable[[], tuple[int, int]]:
    return lambda: (size, size)


@pytest.mark.parametrize(("free", "values"), [(1000, ["1 KiB are free"]), (1 << 40, [])])
def test_host_copy_reports_missing_memory(free: int, values: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(1000)
    monkeypatch.setattr(host_copy, "free_memory", free_memory_of(free))
    monkeypatch.setattr(host_copy.torch, "empty", allocation_fails)
    with raises_problem("out-of-memory", None, "3.9 KiB", *values, kind=NoHostMemoryError):
        copy_of(HostCopy(CPU), a=tensor)
