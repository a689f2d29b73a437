"""Mixup and CutMix: mix each image of a batch, and its label, with the preceding image of the batch.

Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2018; Yun et al., "CutMix: Regularization Strategy to Train
Strong Classifiers with Localizable Features", 2019. The training loop applies it to batches on the device.
"""

from __future__ import annotations

from torch import Tensor, nn

from engine.config.data_sections import AugmentConfig
from engine.config.schema import Config
from engine.data.augment.augmentation import fork_torch_rng
from engine.data.sampler import RandomStream, batch_random_bits


def build_mixer(config: Config, num_classes: int) -> MixupCutmix | None:
    """Return what mixes the batches of a run, None without Mixup and CutMix."""
    if not config.augment.mixup and not config.augment.cutmix:
        return None
    return MixupCutmix(config.augment, num_classes, config.run.seed)


class MixupCutmix:
    """torchvision's v2.MixUp and v2.CutMix, with a random state that depends only on seed, epoch, batch and rank."""

    def __init__(self, augment: AugmentConfig, num_classes: int, seed: int) -> None:
        self._seed = seed
        self._transform = _build_transform(augment, num_classes)

    def __call__(
        self, images: Tensor, labels: Tensor, epoch: int, batch_index: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        """Mix a batch on its device, without a host sync: torchvision draws on the CPU.

        Takes images, N x C x H x W of any floating-point dtype, and labels, N int64. Returns images of the same shape
        and targets, N x num_classes float32 with rows that sum to 1.
        """
        with fork_torch_rng() as seed_rng:
            seed_rng(batch_random_bits(self._seed, RandomStream.MIXUP, epoch, batch_index, rank))
            mixed: tuple[Tensor, Tensor] = self._transform(images, labels)
        return mixed


def _build_transform(augment: AugmentConfig, num_classes: int) -> nn.Module:
    """Return MixUp or CutMix, or a random choice between them per batch if both are enabled."""
    from torchvision.transforms import v2

    transforms: list[nn.Module] = []
    if augment.mixup:
        transforms.append(v2.MixUp(alpha=augment.mixup, num_classes=num_classes))
    if augment.cutmix:
        transforms.append(v2.CutMix(alpha=augment.cutmix, num_classes=num_classes))
    return transforms[0] if len(transforms) == 1 else v2.RandomChoice(transforms)
