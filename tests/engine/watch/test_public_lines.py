"""What public trainers print, read as their authors meant it.

`tests/recordings/lines` has the lines, made from the format strings of the programs that `expected.json` names. It maps
a file to `expect`: a pattern of the name, the number of values, the last step and the last value, where null is any and
a list is one of several. No metric may match a pattern of `absent`. With `or_nothing`, no metric is right, too.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.jobs.command.try_parse import TriedMetric, try_parse

LINES = Path(__file__).parents[2] / "recordings" / "lines"
CASES: dict[str, Any] = json.loads((LINES / "expected.json").read_text())
POSITIONS = r"(^|/)(epochs?|steps?|global_step|iter|iterations?|num_updates|total_timesteps|pid|ip)$"


def is_close(value: float, wanted: float | list[float] | None) -> bool:
    if isinstance(wanted, list):
        return any(is_close(value, one) for one in wanted)
    return wanted is None or value == pytest.approx(wanted, rel=1e-6, nan_ok=True)


def is_as_expected(metric: TriedMetric, wanted: list[Any]) -> bool:
    return all(map(is_close, (metric.count, metric.last_step, metric.last), wanted))


@pytest.mark.parametrize("case", CASES)
def test_lines_of_public_trainers_are_read_as_meant(case: str) -> None:
    metrics = try_parse(LINES / f"{case}.txt").metrics
    if CASES[case].get("or_nothing") and not metrics:
        return
    for pattern, *wanted in CASES[case]["expect"]:
        named = [metric for name, metric in metrics.items() if re.search(pattern, name, re.IGNORECASE)]
        assert any(is_as_expected(metric, wanted) for metric in named), (pattern, wanted, metrics)
    for pattern in (*CASES[case]["absent"], POSITIONS, r"\.py\b"):
        assert not [name for name in metrics if re.search(pattern, name, re.IGNORECASE)]
