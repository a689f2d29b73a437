"""Mixup and CutMix: mix each image of a batch, and its label, with the preceding image of the batch.

Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2018; Yun et al., "CutMix: Regularization Strategy to Train
Strong Classifiers with Localizable Features", 2019. The training loop applies it to batches on the device.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from engine.config.data_sections import AugmentConfig
from engine.data.rng import fork_torch_rng
from engine.data.sampler import RandomStream, batch_random_bits


class MixupCutmix:
    """torchvision's v2.MixUp and v2.CutMix, with a random state that depends only on seed, epoch, batch and rank."""

    def __init__(self, augment: AugmentConfig, num_classes: int, seed: int) -> None:
        self._num_classes, self._seed = num_classes, seed
        self._transform = _build_transform(augment, num_classes)

    @property
    def enabled(self) -> bool:
        """Whether Mixup or CutMix is configured; otherwise calls return the images unchanged."""
        return self._transform is not None

    def __call__(
        self, images: Tensor, labels: Tensor, epoch: int, batch_index: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        """Mix a batch on its device, without a host sync: torchvision draws on the CPU.

        Takes images, N x C x H x W of any floating-point dtype, and labels, N int64. Returns images of the same shape
        and targets, N x num_classes float32 with rows that sum to 1.
        """
        if self._transform is None:
            return images, F.one_hot(labels, self._num_classes).float()
        with fork_torch_rng() as seed_rng:
            seed_rng(batch_random_bits(self._seed, RandomStream.MIXUP, epoch, batch_index, rank))
            mixed: tuple[Tensor, Tensor] = self._transform(images, labels)
        return mixed


def _build_transform(augment: AugmentConfig, num_classes: int) -> nn.Module | None:
    """Return MixUp or CutMix, or a random choice between them per batch if both are enabled; None if neither is."""
    if not augment.mixup and not augment.cutmix:
        return None
    from torchvision.transforms import v2

    transforms: list[nn.Module] = []
    if augment.mixup:
        transforms.append(v2.MixUp(alpha=augment.mixup, num_classes=num_classes))
    if augment.cutmix:
        transforms.append(v2.CutMix(alpha=augment.cutmix, num_classes=num_classes))
    return transforms[0] if len(transforms) == 1 else v2.RandomChoice(transforms)
