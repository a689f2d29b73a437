"""Mixup and CutMix: mix each image of a batch, and its label, with the preceding image of the batch.

Zhang et al., "mixup: Beyond Empirical Risk Minimization", 2018; Yun et al., "CutMix: Regularization Strategy to Train
Strong Classifiers with Localizable Features", 2019. The training loop applies it to batches on the device.
"""

from __future__ import annotations

from torch import Tensor

from engine.config.data_sections import AugmentConfig
from engine.config.schema import Config
from engine.train.data.augment.augmentation import fork_rngs
from engine.train.data.sampler import RandomStream, batch_random_bits


def build_mixer(config: Config, num_classes: int) -> MixupCutmix | None:
    """Return what mixes the batches of a run, None without Mixup and CutMix."""
    augment = config.augment
    return MixupCutmix(augment, num_classes, config.run.seed) if augment.mixup or augment.cutmix else None


class MixupCutmix:
    """torchvision's v2.MixUp and v2.CutMix, with a random state that depends only on seed, epoch, batch and rank.

    If both are enabled, one of them is chosen at random per batch. `augment.mix_probability` and `mix_epochs` leave
    batches as they are.
    """

    def __init__(self, augment: AugmentConfig, num_classes: int, seed: int) -> None:
        from torchvision.transforms import v2

        kinds = ((v2.MixUp, augment.mixup), (v2.CutMix, augment.cutmix))
        transforms = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha]
        transform = transforms[0] if len(transforms) == 1 else v2.RandomChoice(transforms)
        if augment.mix_probability < 1:
            transform = v2.RandomApply([transform], augment.mix_probability)
        self._seed, self._epochs, self._transform = seed, augment.mix_epochs, transform

    def __call__(
        self, images: Tensor, labels: Tensor, epoch: int, batch_index: int, rank: int
    ) -> tuple[Tensor, Tensor]:
        """Mix a batch on its device, without a host sync: torchvision draws on the CPU.

        Takes images, N x C x H x W of any floating-point dtype, and labels, N int64. Returns images of the same shape
        and targets, N x num_classes float32 with rows that sum to 1; or both unchanged.
        """
        if self._epochs is not None and epoch > self._epochs:
            return images, labels
        with fork_rngs() as seed_rng:
            seed_rng(batch_random_bits(self._seed, RandomStream.MIXUP, epoch, batch_index, rank))
            mixed: tuple[Tensor, Tensor] = self._transform(images, labels)
        return mixed
