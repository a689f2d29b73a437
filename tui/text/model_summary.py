"""Output of `gputrain summary`: the layers of a model as a tree, its totals and its feature maps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine.utils.host import format_bytes
from engine.utils.text import printable
from tui.text.tables import COLUMN_GAP, UNKNOWN, format_table

if TYPE_CHECKING:
    from engine.models.summary import LayerSummary, ModelSummary, Shape

LAYER_HEADER = ("LAYER", "TYPE", "OUTPUT", "PARAMETERS", "MULT-ADDS")
GROUP_HEADER = ("WEIGHT DECAY", "LR SCALE", "TENSORS", "PARAMETERS")
FEATURE_HEADER = ("FEATURES OF", "OUTPUT", "STRIDE")


def layer_lines(summary: ModelSummary, depth: int) -> Iterator[str]:
    """Yield the table of modules down to `depth`, indented by nesting level."""
    shown = [layer for layer in summary.layers if layer.depth <= depth]
    some_frozen = summary.trainable < summary.parameters
    rows = [
        (
            "  " * layer.depth + (layer.path.rpartition(".")[2] or summary.model),
            layer.kind,
            format_shape(layer.output),
            f"{layer.parameters:,}" if layer.parameters else UNKNOWN,
            format_si(layer.multiply_adds) if layer.multiply_adds else UNKNOWN,
            *([format_trainable(layer)] if some_frozen else []),
        )
        for layer in shown
    ]
    header = (*LAYER_HEADER, *(["TRAINS"] if some_frozen else []))
    return format_table([header, *rows], right_aligned=(3, 4))


def format_trainable(layer: LayerSummary) -> str:
    """Return whether the parameters of a layer are trained: yes, partly or frozen."""
    if not layer.parameters:
        return ""
    return "yes" if layer.trainable == layer.parameters else "partly" if layer.trainable else "frozen"


def total_lines(summary: ModelSummary) -> Iterator[str]:
    """Yield totals: input, parameters, multiply-adds, weight and activation memory."""
    frozen = summary.parameters - summary.trainable
    rows = {
        "images": f"{format_shape(summary.images)}, {summary.classes} classes",
        "input": printable(summary.input),
        "parameters": f"{summary.parameters:,} ({summary.trainable:,} trainable, {frozen:,} frozen), "
        f"{summary.buffers:,} buffer elements",
        "multiply-adds": format_si(summary.multiply_adds),
        "weights": format_bytes(summary.weight_bytes),
        "activations": f"about {format_bytes(summary.activation_bytes)} of outputs, "
        f"{format_bytes(summary.saved_bytes)} saved for the backward pass",
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        yield f"{name:<{width}}{COLUMN_GAP}{value}"


def feature_lines(summary: ModelSummary) -> Iterator[str]:
    """Yield the table of feature maps with their stride relative to the input."""
    rows = [
        (feature.path, format_shape(feature.output), UNKNOWN if feature.stride is None else f"{feature.stride:.3g}")
        for feature in summary.features
    ]
    return format_table([FEATURE_HEADER, *rows], right_aligned=(2,))


def group_lines(summary: ModelSummary) -> Iterator[str]:
    """Yield the table of parameter groups; nothing if there is only one."""
    if len(summary.groups) > 1:
        rows = [
            (f"{group.weight_decay:g}", f"{group.lr_scale:.4g}", f"{group.tensors:,}", f"{group.parameters:,}")
            for group in summary.groups
        ]
        yield ""
        yield from format_table([GROUP_HEADER, *rows], right_aligned=(0, 1, 2, 3))


def format_shape(shape: Shape | None) -> str:
    """Format a shape as 1x64x8x8."""
    return UNKNOWN if shape is None else "x".join(map(str, shape))


def format_si(number: int) -> str:
    """Format with three significant digits and an SI prefix: 1.81 G."""
    for size, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        # 999.5 k rounds to 1.00 M, not to 1000 k.
        if number >= 0.9995 * size:
            return f"{format_three_digits(number / size)} {unit}"
    return str(number)


def format_three_digits(number: float) -> str:
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"
