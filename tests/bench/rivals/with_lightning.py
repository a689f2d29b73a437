"""Training with PyTorch Lightning, strategy `ddp_spawn`."""

from __future__ import annotations

import sys
import time
import warnings

import lightning
import torch
import torch.nn.functional as F
import work
from torch import Tensor
from torch.utils.data import DataLoader


class Network(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = work.network()
        self.epochs: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.network(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=work.LR, momentum=work.MOMENTUM)

    def on_train_start(self) -> None:
        torch.set_num_threads(1)

    def on_train_epoch_start(self) -> None:
        self.epoch_start = time.perf_counter()

    def on_train_epoch_end(self) -> None:
        # This hook runs after validation, so Lightning's epochs include it.
        self.epochs.append(time.perf_counter() - self.epoch_start)

    def on_fit_end(self) -> None:
        if self.global_rank == 0:
            work.print_epochs(self.epochs)


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    train_set, val_set = work.datasets(folder)
    loader = DataLoader(
        train_set, work.BATCH, shuffle=True, num_workers=work.WORKERS, persistent_workers=True, drop_last=True
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=work.RANKS,
        strategy="ddp_spawn",
        max_epochs=work.EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Network(), loader, DataLoader(val_set, work.BATCH))


if __name__ == "__main__":
    main(sys.argv[1])
