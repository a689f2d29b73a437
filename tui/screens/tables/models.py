"""The tables of `gputrain models` and of `gputrain models show`: models, layers and parameter groups."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.base.units import UNKNOWN, format_bytes, format_count, format_large, format_number
from engine.report.table import Align, Column, plain_lines
from engine.train.models.catalog import filter_models
from tui.screens.tables import fact_lines

if TYPE_CHECKING:
    from engine.train.models.catalog import CatalogModel
    from engine.train.models.summary import LayerSummary, ModelSummary, ParamGroupSummary, Shape

MODEL_COLUMNS: tuple[Column[CatalogModel], ...] = (
    Column("source", "source", lambda model: model.source),
    Column("name", "name", lambda model: model.name),
    Column("parameters", "parameters", lambda model: count_cell(model.parameters), Align.RIGHT),
    Column("top1", "top-1", lambda model: UNKNOWN if model.top1 is None else f"{model.top1:.1f}", Align.RIGHT),
    Column("weights", "weights", lambda model: format_weights(model.weights)),
)  # fmt: skip
GROUP_COLUMNS: tuple[Column[ParamGroupSummary], ...] = (
    Column("weight_decay", "weight decay", lambda group: format_number(group.weight_decay), Align.RIGHT),
    Column("lr_scale", "lr scale", lambda group: format_number(group.lr_scale), Align.RIGHT),
    Column("tensors", "tensors", lambda group: format_count(group.tensors), Align.RIGHT),
    Column("parameters", "parameters", lambda group: format_count(group.parameters), Align.RIGHT),
)


def layer_columns(summary: ModelSummary) -> list[Column[LayerSummary]]:
    """Return the columns of the module tree, whose names are indented by nesting level."""
    columns: list[Column[LayerSummary]] = [
        Column("layer", "layer", lambda layer: "  " * layer.depth + (layer.path.rpartition(".")[2] or summary.model)),
        Column("type", "type", lambda layer: layer.kind),
        Column("output", "output", lambda layer: format_shape(layer.output)),
        Column("parameters", "parameters", lambda layer: count_cell(layer.parameters or None), Align.RIGHT),
        Column("multiply_adds", "mult-adds", lambda layer: format_large(layer.multiply_adds) if layer.multiply_adds
               else UNKNOWN, Align.RIGHT),
    ]  # fmt: skip
    if summary.trainable < summary.parameters:
        columns.append(Column("trains", "trains", format_trainable))
    return columns


def layer_lines(summary: ModelSummary, depth: int) -> list[str]:
    """Return the table of modules down to `depth`."""
    return plain_lines(layer_columns(summary), [layer for layer in summary.layers if layer.depth <= depth])


def total_lines(summary: ModelSummary) -> list[str]:
    """Return totals: input, parameters, multiply-adds and the memory of the weights."""
    frozen = summary.parameters - summary.trainable
    facts = {
        "images": f"{format_shape(summary.images)}, {summary.classes} classes",
        "input": summary.input,
        "parameters": f"{summary.parameters:,} ({summary.trainable:,} trainable, {frozen:,} frozen), "
        f"{summary.buffers:,} buffer elements",
        "multiply-adds": format_large(summary.multiply_adds),
        "weights": format_bytes(summary.weight_bytes),
    }
    return fact_lines(facts)


def group_lines(summary: ModelSummary) -> list[str]:
    """Return the table of parameter groups; nothing if there is only one."""
    return ["", *plain_lines(GROUP_COLUMNS, summary.groups)] if len(summary.groups) > 1 else []


def count_cell(count: int | None) -> str:
    """Return a number of parameters in full."""
    return UNKNOWN if count is None else format_count(count)


def format_weights(weights: Sequence[str]) -> str:
    """Return the default weights of the library and the number of alternatives."""
    if not weights:
        return UNKNOWN
    # Some timm weights have an empty tag.
    first = weights[0] or "yes"
    return first if len(weights) == 1 else f"{first} (+{len(weights) - 1})"


def format_trainable(layer: LayerSummary) -> str:
    """Return whether the parameters of a layer are trained: yes, partly or frozen."""
    if not layer.parameters:
        return ""
    return "yes" if layer.trainable == layer.parameters else "partly" if layer.trainable else "frozen"


def format_shape(shape: Shape | None) -> str:
    """Format a shape as 1x64x8x8."""
    return UNKNOWN if shape is None else "x".join(map(str, shape))


MAX_SUGGESTIONS = 5


def no_match_message(available: Sequence[CatalogModel], pattern: str | None, *, pretrained: bool) -> str:
    """Return why no model matches, with the nearest names."""

    if pretrained and filter_models(available, pattern):
        return (
            f"no model with {pattern!r} in its name has pretrained weights"
            if pattern
            else "no model has pretrained weights"
        )
    similar = difflib.get_close_matches(
        (pattern or "").lower(), [model.name for model in available], MAX_SUGGESTIONS, 0.4
    )
    # Two sources can have a model of the same name.
    hint = f"; similar names: {', '.join(dict.fromkeys(similar))}" if similar else ""
    return f"no model has {pattern!r} in its name{hint}"
