"""CPU kernels for the fake CUDA runtime: the arithmetic that fake_cuda.c refuses to run.

Each aten operator with a CUDA kernel gets one that computes on the CPU, on the same memory. Operators that only
allocate or reinterpret memory keep torch's own CUDA code. hooks/sitecustomize.py calls `install` after `import torch`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# These run torch's own code for CUDA on the fake runtime: memory, its views, and copies to and from the host.
NATIVE_OPERATORS = {
    "empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "set_", "set_.source_Tensor",
    "set_.source_Storage", "set_.source_Storage_storage_offset", "resize_", "record_stream", "is_pinned", "_pin_memory",
    "_local_scalar_dense", "view_as_real", "view_as_complex", "unfold", "_efficientzerotensor", "is_set_to",
}  # fmt: skip
# These have no CUDA kernel of their own: autograd calls the kernels of cuDNN or of other operators.
COMPOSITE_OPERATORS = ["convolution", "convolution_backward", "_scaled_dot_product_attention_math"]
# The host waits for the device, because the values determine the shape of the result.
SYNCHRONIZING_OPERATORS = {
    "nonzero", "masked_select", "_unique2", "equal", "unique_dim", "unique_consecutive", "_assert_async",
}  # fmt: skip
# These raise with torch.use_deterministic_algorithms, as its documentation lists them for torch 2.9 to 2.15. Of
# `cumsum`, only floating-point sums do, up to torch 2.11.
NONDETERMINISTIC_OPERATORS = {
    "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "max_unpool2d",
    "max_unpool3d", "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward",
    "upsample_trilinear3d_backward", "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward", "nll_loss2d_forward",
    "_ctc_loss_backward", "put_", "histc", "median", "kthvalue", "grid_sampler_2d_backward", "grid_sampler_3d_backward",
    "cumsum",
}  # fmt: skip
# These accept index tensors on the CPU for values on the GPU.
INDEX_OPERATORS = {"index", "index_put_", "_index_put_impl_"}
CPU = torch.device("cpu")
ERROR_MODE = 2  # of torch.cuda.set_sync_debug_mode


def host_view(tensor: Tensor) -> Tensor:
    """Return a CPU tensor in the same memory."""
    storage = tensor.untyped_storage()
    host = torch.UntypedStorage(0)
    if storage.nbytes():
        memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
        host = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU tensor in memory of the caching allocator."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.contiguous()
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    host_view(copy).copy_(tensor)
    return copy


class Call:
    """Arguments of an operator, translated to the CPU, and the device that they are on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.devices: set[torch.device] = set()
        self.on_cpu = False
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # id of a CUDA tensor -> the tensor, its view

    def to_host(self, argument: Any) -> Any:
        match argument:
            case Tensor(device=torch.device(type="cuda")):
                self.devices.add(argument.device)
                if id(argument) not in self._views:
                    self._views[id(argument)] = argument, host_view(argument)
                return self._views[id(argument)][1]
            case Tensor():
                # A CPU scalar may be combined with CUDA tensors.
                self.on_cpu |= argument.dim() > 0
            case torch.device(type="cuda", index=index):
                self.devices.add(torch.device("cuda", torch.cuda.current_device() if index is None else index))
                return CPU
            case torch.Generator(device=torch.device(type="cuda")):
                return torch.default_generator
        return argument

    def to_device(self, result: Any) -> Any:
        """Return a result on the device: the argument itself if the operator returned that one."""
        if not isinstance(result, Tensor):
            return result
        for original, view in self._views.values():
            if view is result:
                return original
        return copy_to_device(result, self.device)

    def resize_outputs(self) -> None:
        """Apply the new shapes of output arguments that were too small."""
        for original, view in self._views.values():
            if view.shape != original.shape:
                original.resize_(view.shape)
                host_view(original).copy_(view)

    @property
    def device(self) -> torch.device:
        """The only device. Raises RuntimeError if there are several, as a real kernel does."""
        devices = sorted(map(str, self.devices)) + ["cpu"] * (self.on_cpu and self.name not in INDEX_OPERATORS)
        if len(devices) != 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices} ({self.name})")
        return next(iter(self.devices))


def raises_if_deterministic(name: str, arguments: list[Any]) -> bool:
    return name in NONDETERMINISTIC_OPERATORS and (name != "cumsum" or arguments[0].is_floating_point())


def cpu_kernel(operator: Any) -> Callable[..., Any]:
    """Return a CUDA kernel of an operator that runs its CPU kernel."""
    name = operator._schema.name.removeprefix("aten::")
    tensor_positions = [index for index, one in enumerate(operator._schema.arguments) if str(one.type) == "Tensor"]

    def run(*args: Any, **kwargs: Any) -> Any:
        call = Call(name)
        host_args = [tree_map(call.to_host, argument) for argument in args]
        host_kwargs = {key: tree_map(call.to_host, value) for key, value in kwargs.items()}
        if "pin_memory" in host_kwargs:
            host_kwargs["pin_memory"] = False
        for position in tensor_positions:
            # The dispatcher passes a wrapped number as a Python number.
            if position < len(host_args) and isinstance(host_args[position], int | float):
                host_args[position] = torch.tensor(host_args[position])
        device = call.device
        if name in SYNCHRONIZING_OPERATORS and torch.cuda.get_sync_debug_mode() == ERROR_MODE:
            raise RuntimeError(f"called a synchronizing CUDA operation ({name})")
        if torch.are_deterministic_algorithms_enabled() and raises_if_deterministic(name, host_args):
            raise RuntimeError(f"{name}_cuda does not have a deterministic implementation")
        with torch.cuda.device(device):
            result = operator(*host_args, **host_kwargs)
            call.resize_outputs()
            return tree_map(call.to_device, result)

    return run


def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between GPUs on the CPU; torch's own code copies to and from the host, with its pinned memory and syncs."""
    if self.device.type == source.device.type:
        host_view(self).copy_(host_view(source))
    else:
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
        torch.ops.aten.copy_.default.redispatch(keys, self, source, non_blocking)
    return self


# ---- Kernels of SyncBatchNorm, which exist for CUDA only; torch/nn/modules/_functions.py calls them ----


def channel_sum(values: Tensor) -> Tensor:
    return values.sum([dim for dim in range(values.dim()) if dim != 1])


def per_channel(values: Tensor, images: Tensor) -> Tensor:
    return host_view(values).float().view(1, -1, *[1] * (images.dim() - 2))


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # noqa: A002 - as in the schema
    images = host_view(input).float()
    var, mean = torch.var_mean(images, [dim for dim in range(images.dim()) if dim != 1], correction=0)
    return copy_to_device(mean, input.device), copy_to_device((var + eps).rsqrt(), input.device)


def batch_norm_gather_stats_with_counts(*arguments: Any) -> tuple[Tensor, Tensor]:
    images, mean, invstd, running_mean, running_var, momentum, eps, counts = arguments
    means, variances = host_view(mean), host_view(invstd) ** -2 - eps
    weights = host_view(counts).float().view(-1, 1)
    count = weights.sum()
    total_mean = (means * weights).sum(0) / count
    total_var = ((variances + (means - total_mean) ** 2) * weights).sum(0) / count
    if running_mean is not None:
        host_view(running_mean).lerp_(total_mean, momentum)
        host_view(running_var).lerp_(total_var * count / (count - 1), momentum)
    return copy_to_device(total_mean, images.device), copy_to_device((total_var + eps).rsqrt(), images.device)


def batch_norm_elemt(*arguments: Any) -> Tensor:
    images, weight, bias, mean, invstd, _ = arguments
    output = (host_view(images).float() - per_channel(mean, images)) * per_channel(invstd, images)
    if weight is not None:
        output = output * per_channel(weight, images) + per_channel(bias, images)
    return copy_to_device(torch.empty_like(host_view(images)).copy_(output), images.device)


def batch_norm_backward_reduce(*arguments: Any) -> tuple[Tensor, ...]:
    grad_output, images, mean, invstd, _, *_ = arguments
    grad = host_view(grad_output).float()
    sum_dy = channel_sum(grad)
    sum_dy_xmu = channel_sum(grad * (host_view(images).float() - per_channel(mean, images)))
    results = sum_dy, sum_dy_xmu, sum_dy_xmu * host_view(invstd), sum_dy
    return tuple(copy_to_device(result, images.device) for result in results)


def batch_norm_backward_elemt(*arguments: Any) -> Tensor:
    grad_output, images, mean, invstd, weight, sum_dy, sum_dy_xmu, counts = arguments
    count = host_view(counts).sum().float()
    inverse = per_channel(invstd, images)
    centered = host_view(images).float() - per_channel(mean, images)
    grad = host_view(grad_output).float() - per_channel(sum_dy, images) / count
    grad = (grad - centered * inverse**2 * per_channel(sum_dy_xmu, images) / count) * inverse
    if weight is not None:
        grad = grad * per_channel(weight, images)
    return copy_to_device(torch.empty_like(host_view(images)).copy_(grad), images.device)


def _fused_sgd_(*lists: list[Tensor], **options: Any) -> None:
    """Compute in float32: up to torch 2.13, the kernel of the CPU leaves most float16 weights unchanged."""
    host_lists = [[host_view(tensor) for tensor in tensors] for tensors in lists]
    float_lists = [[view.float() for view in views] for views in host_lists]
    torch._fused_sgd_(*float_lists, **tree_map(Call("_fused_sgd_").to_host, options))
    for views, values in zip(host_lists, float_lists, strict=True):
        for view, value in zip(views, values, strict=True):
            view.copy_(value)


CUDA_ONLY = [
    batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt, batch_norm_backward_reduce,
    batch_norm_backward_elemt,
]  # fmt: skip


def replaced_operators() -> Iterator[tuple[str, Any]]:
    """Yield the name and the operator of each aten operator with a CUDA kernel to replace."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for qualified_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified_name.partition("::")
        if namespace != "aten" or name in NATIVE_OPERATORS or not has_kernel(qualified_name, "CUDA"):
            continue
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if operator is not None:
            yield name, operator
    for name in COMPOSITE_OPERATORS:
        yield name, getattr(torch.ops.aten, name).default


LIBRARY = torch.library.Library("aten", "IMPL")  # the kernels are removed when it is freed


def install() -> None:
    """Replace the CUDA kernels of this process."""
    for name, operator in replaced_operators():
        LIBRARY.impl(name, cpu_kernel(operator), "CUDA", allow_override=True)
    for kernel in [copy_, _fused_sgd_, *CUDA_ONLY]:
        LIBRARY.impl(kernel.__name__, kernel, "CUDA", allow_override=True)
    # cuDNN does not go through the CUDA runtime alone; without it, torch calls operators that are replaced.
    torch.backends.cudnn.enabled = False
