"""Conversion of the values of a command line, without typer's own where none is needed.

For every parameter, typed or not, typer builds a conversion with pydantic. To import that takes a third of the CPU time
of `gputrain runs`, which needs it for nothing else. `tui.cli.help` builds the commands.
"""

from __future__ import annotations

from typing import Any, get_args

from typer._coercion import RuntimeParam, build_runtime_param


class LateConversion(RuntimeParam):
    """Lets typer convert only what was typed and is not text."""

    def _coerce_value(self, value: Any, param: Any, ctx: Any) -> Any:
        is_text = self.annotation is str or get_args(self.annotation) == (str,)
        if value is param.default or isinstance(value, bool) or is_text:
            return list(value) if isinstance(value, tuple) else value
        return build_runtime_param(param.type_descriptor).coerce(value, param, ctx)


def convert_late(parameters: list[Any]) -> list[Any]:
    """Make typer convert typed values only, not defaults. Return the parameters."""
    for parameter in parameters:
        kind = parameter.type_descriptor
        if parameter._runtime_param is None and not kind.is_file:
            parameter._runtime_param = LateConversion(kind.parameter_info, kind.annotation)
    return parameters
