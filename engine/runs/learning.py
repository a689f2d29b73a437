"""Diagnose how a run learns: diverged or overfitting.

`engine.runs.history` calls `diagnose_learning` with all epochs; log, record and screen show the result beside that of
`engine.runs.bottleneck`. It decides on the journal alone. If an input is missing, or there are too few epochs or steps,
there is no diagnosis. Of several faults, the one that is most certain is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.runs.events import EpochEvent, RunStarted
from engine.runs.records import Learning, LearningFault
from engine.utils.codec import or_none
from engine.utils.text import pluralize

# Epochs and steps at the full learning rate before a judgement; two epochs show that a run has diverged. BatchNorm's
# running statistics need about 30 steps to follow the weights, and until then the validation says little.
MIN_EPOCHS = 3
MIN_STEPS = 30
# Share of the steps of an epoch that are skipped because they are not finite. AMP's loss scale costs a few.
DIVERGED_SKIPPED_SHARE = 0.5
# Loss vs. that of guessing, in two epochs in a row. Networks start at up to 1.3, and learn to guess in one epoch.
DIVERGED_RATIO = 2.0
# A run that has learned and returned to the loss of guessing has diverged, too.
LOST_RATIO = 0.9  # loss vs. that of guessing
LOST_GROWTH = 1.3  # loss vs. the lowest of earlier epochs
# Overfitting: training is ahead of validation in the last fifth of the run so far, and validation does not improve.
OVERFIT_MIN_EPOCHS = 5
OVERFIT_MIN_WINDOW = 3
OVERFIT_WINDOW_SHARE = 0.2
OVERFIT_GAP = 0.20  # training accuracy minus validation accuracy
OVERFIT_GAP_OF_RISEN_LOSS = 0.08
OVERFIT_RISE = 1.15  # validation loss vs. its lowest value
OVERFIT_IMPROVEMENT = 0.01  # of the validation accuracy, or of the loss as a share: less is none
LOWER_LR = "lower optim.lr (gputrain lr-find CONFIG)"


@dataclass(frozen=True)
class LearningCurve:
    """What the diagnosis is made of: the start of the latest session, the epochs of the run, and whether a
    rank has failed at a loss that is not finite."""

    started: RunStarted
    epochs: Sequence[EpochEvent]
    nonfinite: bool = False

    @property
    def at_full_lr(self) -> list[EpochEvent]:
        """Epochs that began after the warmup, with known losses; none if the journal does not say how long it is."""
        if (warmup := or_none(self.started.warmup_steps)) is None:
            return []
        begin = warmup + self.started.steps_per_epoch
        return [epoch for epoch in self.epochs if epoch.step >= begin and _has_losses(epoch)]

    @property
    def guessing_loss(self) -> float | None:
        """Training loss of guessing; None if unknown."""
        loss = or_none(self.started.guessing_loss)
        return loss if loss is not None and loss > 0 else None


def diagnose_learning(curve: LearningCurve) -> Learning | None:
    """Return what keeps a run from learning well, or None if nothing does or too little is known."""
    checks: list[Callable[[LearningCurve], Learning | None]] = [_nonfinite]
    epochs = curve.at_full_lr
    if len(epochs) * curve.started.steps_per_epoch >= MIN_STEPS:
        checks += [_diverged] if len(epochs) >= 2 else []
        checks += [_overfitting] if len(epochs) >= MIN_EPOCHS else []
    for check in checks:
        if (found := check(curve)) is not None:
            return found
    return None


def _nonfinite(curve: LearningCurve) -> Learning | None:
    if curve.nonfinite:
        return Learning(LearningFault.DIVERGED, f"diverged: the loss is not finite; {LOWER_LR}")
    if not curve.epochs or not curve.started.steps_per_epoch:
        return None
    before = curve.epochs[-2].skipped_steps if len(curve.epochs) > 1 else 0
    skipped = curve.epochs[-1].skipped_steps - before
    if skipped < DIVERGED_SKIPPED_SHARE * curve.started.steps_per_epoch:
        return None
    of_steps = f"{skipped} of {pluralize(curve.started.steps_per_epoch, 'step')} not finite"
    return Learning(LearningFault.DIVERGED, f"diverged: {of_steps}; {LOWER_LR}")


def _diverged(curve: LearningCurve) -> Learning | None:
    guess, epochs = curve.guessing_loss, curve.at_full_lr
    if guess is None:
        return None
    before, last = _losses(epochs[-2:])
    if min(before, last) > DIVERGED_RATIO * guess:
        message = f"diverged: loss {_loss(last)}, random guess {_loss(guess)}; {LOWER_LR}"
        return Learning(LearningFault.DIVERGED, message)
    lowest = min(epoch.train_loss for epoch in curve.epochs[:-1] if epoch.train_loss is not None)
    if last >= max(LOST_RATIO * guess, LOST_GROWTH * lowest):
        message = f"diverged: loss grew from {_loss(lowest)} to {_loss(last)}; {LOWER_LR}"
        return Learning(LearningFault.DIVERGED, message)
    return None


def _overfitting(curve: LearningCurve) -> Learning | None:
    # A task without accuracy has none to compare.
    epochs = [epoch for epoch in curve.epochs if _has_losses(epoch) and _has_accuracies(epoch)]
    window = max(OVERFIT_MIN_WINDOW, round(OVERFIT_WINDOW_SHARE * len(epochs)))
    earlier, recent = epochs[:-window], epochs[-window:]
    if len(epochs) < OVERFIT_MIN_EPOCHS:
        return None
    gap = min((epoch.train_accuracy or 0.0) - (epoch.val_accuracy or 0.0) for epoch in recent)
    best = min(earlier, key=lambda epoch: epoch.val_loss or 0.0)
    lowest, recent_lowest = best.val_loss or 0.0, min(epoch.val_loss or 0.0 for epoch in recent)
    improves = recent_lowest < (1 - OVERFIT_IMPROVEMENT) * lowest or (
        max(epoch.val_accuracy or 0.0 for epoch in recent)
        > max(epoch.val_accuracy or 0.0 for epoch in earlier) + OVERFIT_IMPROVEMENT
    )
    has_risen = recent_lowest >= OVERFIT_RISE * lowest
    if improves or gap < (OVERFIT_GAP_OF_RISEN_LOSS if has_risen else OVERFIT_GAP):
        return None
    last = recent[-1]
    message = (
        f"overfitting: train acc {last.train_accuracy:.0%}, val acc {last.val_accuracy:.0%}; try augmentation or "
        "optim.weight_decay"
    )
    return Learning(LearningFault.OVERFITTING, message)


def _has_losses(epoch: EpochEvent) -> bool:
    return None not in (epoch.train_loss, epoch.val_loss)


def _has_accuracies(epoch: EpochEvent) -> bool:
    return None not in (epoch.train_accuracy, epoch.val_accuracy)


def _losses(epochs: Sequence[EpochEvent]) -> list[float]:
    return [epoch.train_loss for epoch in epochs if epoch.train_loss is not None]


def _loss(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.2e}"
