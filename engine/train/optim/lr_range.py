"""Learning rate range test: its learning rates, its loss curve, and the learning rate that the curve suggests.

Smith, Cyclical Learning Rates for Training Neural Networks, 2017 (section 3.3): train while the learning rate grows,
and choose one from the range in which the loss falls. `engine.train.loop.loop` runs the test on the ranks,
`engine.jobs.launch.training` starts it and follows its losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from engine.base.errors import UsageError

MIN_STEPS, MAX_STEPS = 20, 10_000
# Weight of the past in the exponential average of a test of 100 steps. Others average the same share of their steps.
SMOOTHING_PER_100_STEPS = 0.9
MAX_LOSS_RATIO = 4.0  # smoothed loss vs. the lowest before it, as in fastai's LRFinder
SKIPPED_SHARE = 0.1  # of the steps: the first averages hold few losses, as in fastai's lr_find
LEVEL_SHARE = 0.1  # of the fall, above the valley and below it
VALLEY_POSITION = 2 / 3  # from the start of the valley to its end
# A smaller fall of the smoothed loss suggests nothing: as a share of the loss, and in standard deviations of its noise.
MIN_FALL, MIN_FALL_DEVIATIONS = 0.05, 12.0
# Median of the absolute difference of two normal variables, in their standard deviations.
MEDIAN_DIFFERENCE = 0.954


@dataclass(frozen=True)
class LrRange:
    """The learning rates of a range test: `steps` values of `optim.lr` from `low` to `high`, a geometric series."""

    low: float = 1e-6
    high: float = 10.0
    steps: int = 100

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return self.low * math.pow(self.high / self.low, (step - 1) / (self.steps - 1))

    def check(self) -> None:
        """Raise UsageError if the range is not one."""
        if not 0 < self.low < math.inf:
            raise UsageError.one("--from", f"must be a learning rate above 0, not {self.low:g}", code="out-of-range")
        if not self.low < self.high < math.inf:
            reason = f"must be a learning rate above --from, {self.low:g}, not {self.high:g}"
            raise UsageError.one("--to", reason, code="out-of-range")


@dataclass
class LossCurve:
    """The losses of a range test, one for each step, and their smoothed curve."""

    lr_range: LrRange
    losses: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    """Exponential average of the losses with bias correction (Kingma and Ba, Adam, 2015, section 3)."""
    diverged: bool = False
    """Whether the smoothed loss exceeds `MAX_LOSS_RATIO` times its minimum, or is not finite. The test ends there."""
    _average: float = field(default=0.0, repr=False)

    def add(self, loss: float) -> bool:
        """Add the loss of the next step, averaged over the ranks; return whether it has diverged."""
        self._average = self._beta * self._average + (1 - self._beta) * loss
        self.losses.append(loss)
        self.smoothed.append(self._average / (1 - self._beta ** len(self.losses)))
        smoothed = self.smoothed[-1]
        self.diverged = not math.isfinite(smoothed) or smoothed > MAX_LOSS_RATIO * min(self.smoothed)
        return self.diverged

    @property
    def _beta(self) -> float:
        return math.pow(SMOOTHING_PER_100_STEPS, 100 / self.lr_range.steps)

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each loss."""
        return [self.lr_range.lr_at(step) for step in range(1, len(self.losses) + 1)]

    def suggest(self) -> float | None:
        """Return a value of `optim.lr` two thirds into the stretch in which the loss falls; None without a fall."""
        skipped = round(SKIPPED_SHARE * self.lr_range.steps)
        curve = [loss for loss in self.smoothed[skipped:] if math.isfinite(loss)]
        if not curve:
            return None
        lowest = min(range(len(curve)), key=curve.__getitem__)
        highest = max(curve[: lowest + 1])
        # The standard deviation of the smoothed loss, from the differences of the first losses.
        first_losses = self.losses[: skipped + lowest + 1]
        differences = [abs(second - first) for first, second in pairwise(first_losses)]
        noise = median(differences) / MEDIAN_DIFFERENCE * math.sqrt((1 - self._beta) / (1 + self._beta))
        if lowest < 2 or highest - curve[lowest] < max(MIN_FALL * highest, MIN_FALL_DEVIATIONS * noise):
            return None
        start, end = valley(curve)
        step = skipped + start + round(VALLEY_POSITION * (end - start)) + 1
        return float(f"{self.lr_range.lr_at(step):.3g}")


def valley(curve: Sequence[float]) -> tuple[int, int]:
    """Return the first and the last index of the stretch in which the curve falls from its top to its minimum.

    It begins at the last point of the top `LEVEL_SHARE` of the fall, and ends at the first one of the bottom share.
    fastai's `valley` (fastai/callback/schedule.py, by ESRI) suggests a learning rate two thirds into such a stretch. It
    takes the longest decreasing subsequence, whose ends on a flat top and a flat bottom depend on noise.
    """
    lowest = min(range(len(curve)), key=curve.__getitem__)
    level = LEVEL_SHARE * (max(curve[: lowest + 1]) - curve[lowest])
    start = max(index for index in range(lowest + 1) if curve[index] >= max(curve[: lowest + 1]) - level)
    return start, next(index for index in range(start, lowest + 1) if curve[index] <= curve[lowest] + level)
