"""Diagnose how a run learns: diverged, stuck, one class only, overfitting, or a learning rate that is at its end.

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
from engine.utils.units import format_number

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
# A schedule that spans the run has 50% of the peak left after the first of two epochs.
LR_END_SHARE = 0.02
# Share of the validation images that are predicted as the same class, in two epochs in a row.
ONE_CLASS_SHARE = 0.999
# If training is better than validation by more, the validation is that of BatchNorm statistics that lag behind.
ONE_CLASS_MAX_GAP = 0.1
# A loss without progress. A smaller range is noise, because each epoch drops other images.
FLAT_RANGE = 0.02  # highest minus lowest loss, vs. the loss of guessing
FLAT_RATIO = 0.95  # all losses vs. that of guessing; a constant loss below has converged
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
    """What the diagnosis is made of: the start of the latest session, the epochs of the run, the highest learning rate
    in step events after the first epoch (None without any), and whether a rank has failed at a loss that is not
    finite."""

    started: RunStarted
    epochs: Sequence[EpochEvent]
    later_lr: float | None = None
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

    @property
    def peak_lr(self) -> float | None:
        """Highest learning rate of the schedule; None if unknown."""
        lr = or_none(self.started.peak_lr)
        return lr if lr is not None and lr > 0 else None


def diagnose_learning(curve: LearningCurve) -> Learning | None:
    """Return what keeps a run from learning well, or None if nothing does or too little is known."""
    checks: list[Callable[[LearningCurve], Learning | None]] = [_nonfinite, _lr_at_end]
    epochs = curve.at_full_lr
    if len(epochs) * curve.started.steps_per_epoch >= MIN_STEPS:
        checks += [_diverged] if len(epochs) >= 2 else []
        checks += [_one_class, _flat, _overfitting] if len(epochs) >= MIN_EPOCHS else []
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


def _lr_at_end(curve: LearningCurve) -> Learning | None:
    """A schedule that counts steps where epochs are meant ends before the second epoch."""
    if curve.peak_lr is None or len(curve.epochs) < 2 or not curve.at_full_lr:
        return None
    rates = [*(epoch.lr for epoch in curve.epochs), curve.later_lr]
    highest = max((lr for lr in rates if lr is not None), default=None)
    if highest is None or highest > LR_END_SHARE * curve.peak_lr:
        return None
    message = (
        f"LR fell from {format_number(curve.peak_lr)} to {format_number(highest)} in epoch 1; try schedule.by=epoch "
        "or a longer schedule"
    )
    return Learning(LearningFault.LR_AT_END, message)


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


def _one_class(curve: LearningCurve) -> Learning | None:
    epochs = curve.at_full_lr[-2:]
    for epoch in epochs:
        share, accuracy, trained = or_none(epoch.top_prediction), epoch.val_accuracy, epoch.train_accuracy
        if share is None or accuracy is None or trained is None:
            return None
        # With an accuracy of 1, the validation images have one class only.
        if share < ONE_CLASS_SHARE or accuracy >= 1 or trained > accuracy + ONE_CLASS_MAX_GAP:
            return None
    accuracy = epochs[-1].val_accuracy or 0.0
    message = f"predicts one class only (val acc {accuracy:.1%}); lower optim.lr or set loss.class_weights=balanced"
    return Learning(LearningFault.ONE_CLASS, message)


def _flat(curve: LearningCurve) -> Learning | None:
    guess, losses = curve.guessing_loss, _losses(curve.at_full_lr)
    if guess is None or min(losses) < FLAT_RATIO * guess or max(losses) - min(losses) > FLAT_RANGE * guess:
        return None
    message = (
        f"loss stays at {_loss(losses[-1])}, random guess {_loss(guess)}; change optim.lr (gputrain lr-find CONFIG)"
    )
    return Learning(LearningFault.FLAT, message)


def _overfitting(curve: LearningCurve) -> Learning | None:
    epochs = [epoch for epoch in curve.epochs if _has_losses(epoch)]
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
    return None not in (epoch.train_loss, epoch.val_loss, epoch.train_accuracy, epoch.val_accuracy)


def _losses(epochs: Sequence[EpochEvent]) -> list[float]:
    return [epoch.train_loss for epoch in epochs if epoch.train_loss is not None]


def _loss(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.2e}"
