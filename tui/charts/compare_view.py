"""The curves of several runs on one chart: one color and one letter a run, groups of seeds as mean and spread.

`tui.screens.compare` draws them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.runs.curves import NO_BLOCKS, BlockSeries, Curves, XAxis
from engine.runs.series import mean_and_spread
from tui.charts.plot import Curve
from tui.palette import series_style


@dataclass(frozen=True, eq=False)
class ComparedCurves:
    """A run or a group of runs on the charts: its letter, its name, and the curves of its runs, None before they are
    read."""

    letter: str
    name: str
    style_number: int
    runs: tuple[Curves | None, ...]

    @property
    def style(self) -> str:
        return series_style(self.style_number)


class CompareData:
    """All curves of a comparison."""

    def __init__(self, entries: Sequence[ComparedCurves] = ()) -> None:
        self.entries = tuple(entries)

    @property
    def known(self) -> list[Curves]:
        """The curves that have been read."""
        return [run for entry in self.entries for run in entry.runs if run is not None]

    def last_x(self, axis: XAxis) -> float:
        """Return the x position of the latest step of all runs; 1 before the first step."""
        return max((run.last_x(axis) for run in self.known), default=0.0) or 1.0

    def odd_limits(self, names: Iterable[str], axis: XAxis) -> tuple[float, float] | None:
        """Return the limits of the x axis of metrics whose steps differ in kind from those of others."""
        limits = [run.odd_limits(map(run.name_of, names), axis) for run in self.known]
        return next(filter(None, limits), None)

    def curves_for(self, chart_id: str, axis: XAxis) -> list[Curve]:
        """Return a curve for each entry."""
        return [_entry_curve(entry, chart_id, axis) for entry in self.entries]

    @property
    def block_steps(self) -> int:
        """Steps in one block of the most reduced training loss; 1 if every step is there."""
        return max((run.block_size(run.name_of("train_loss")) for run in self.known), default=1)


def _entry_curve(entry: ComparedCurves, chart_id: str, axis: XAxis) -> Curve:
    known = [run for run in entry.runs if run is not None]
    blocks = [run.over(run.name_of(chart_id), axis) for run in known]
    if len(blocks) > 1:
        mean, band = mean_and_spread([block.means for block in blocks])
        return Curve(entry.name, BlockSeries(mean, mean), entry.style, mark=entry.letter, band=band)
    best = known[0].best(axis) if known and chart_id == "best_val_accuracy" else None
    star_x = None if best is None else best.x
    return Curve(entry.name, blocks[0] if blocks else NO_BLOCKS, entry.style, star_x=star_x, mark=entry.letter)
