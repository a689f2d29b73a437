"""Mixup (Zhang et al., 2018) and cutmix (Yun et al., 2019): each image of a batch mixed with the one before it, and so
are their labels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from engine.config.data_sections import AugmentConfig
from engine.data.rng import fork_torch_rng
from engine.data.sampler import RandomStream, batch_random_bits


class MixupCutmix:
    """What is drawn for a batch depends on the seed, the epoch, the batch and the rank alone."""

    def __init__(self, augment: AugmentConfig, num_classes: int, seed: int) -> None:
        self._num_classes, self._seed = num_classes, seed
        self._transform = _build_transform(augment, num_classes)

    @property
    def enabled(self) -> bool:
        return self._transform is not None

    def __call__(
        self, images: Tensor, labels: Tensor, epoch: int, batch_index: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        """Images N x C x H x W of any floating-point type and labels N of int64, to images and targets N x classes of
        float32, each of which sums to 1. The device is not waited for: torchvision draws on the CPU."""
        if self._transform is None:
            return images, F.one_hot(labels, self._num_classes).float()
        with fork_torch_rng() as seeded:
            seeded(batch_random_bits(self._seed, RandomStream.MIXUP, epoch, batch_index, rank))
            mixed: tuple[Tensor, Tensor] = self._transform(images, labels)
        return mixed


def _build_transform(augment: AugmentConfig, num_classes: int) -> nn.Module | None:
    """One of the two, or for each batch one of them at random."""
    if not augment.mixup and not augment.cutmix:
        return None
    from torchvision.transforms import v2

    mixes: list[nn.Module] = []
    if augment.mixup:
        mixes.append(v2.MixUp(alpha=augment.mixup, num_classes=num_classes))
    if augment.cutmix:
        mixes.append(v2.CutMix(alpha=augment.cutmix, num_classes=num_classes))
    return mixes[0] if len(mixes) == 1 else v2.RandomChoice(mixes)
