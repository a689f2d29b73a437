"""Test-time augmentation (`eval.tta`), for the evaluation of a run and for trained models."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.config.training_sections import EvalConfig


def augmented_logits(forward: Callable[[Tensor], Tensor], images: Tensor, config: EvalConfig) -> Tensor:
    """Return the logits of `images`, N x C x H x W, averaged over the views that `eval.tta` names.

    The logits are averaged, as timm does (`--tta` of its train.py), not the probabilities, as fastai does
    (`Learner.tta`): the loss is then that of the averaged model. The mean is float32.
    """
    logits = forward(images)
    if config.tta == "none":
        return logits
    # The CUDA graphs of torch.compile write the second output over the first.
    first = logits.float().clone()
    return (first + forward(images.flip(-1)).float()) / 2
