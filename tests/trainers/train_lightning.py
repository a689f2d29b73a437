"""Train with Lightning, with its CSV and its TensorBoard logger."""

# Needs: lightning tensorboard
from typing import Any

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from logged_values import SEED, LoggedValues
from torch.utils.data import DataLoader, TensorDataset

PARAMETERS = {"lr": 0.05, "name": "tiny"}


class Model(LightningModule):
    def __init__(self, lr: float, name: str) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("val/loss", torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=PARAMETERS["lr"])


def main(logged: LoggedValues) -> None:
    class RecordedCsv(CSVLogger):
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            super().log_metrics(metrics, step)
            # The column of epochs is no metric.
            logged.add("csv/version_0", {key: metrics[key] for key in metrics if key != "epoch"}, step or 0)

    class RecordedEvents(TensorBoardLogger):
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            super().log_metrics(metrics, step)
            logged.add("events/version_0", metrics, step or 0)

    seed_everything(SEED, verbose=False)
    inputs = torch.randn(16, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loggers = [
        RecordedCsv(logged.folder, name="csv", flush_logs_every_n_steps=1),
        RecordedEvents(logged.folder, name="events"),
    ]
    trainer = Trainer(max_epochs=3, accelerator="cpu", logger=loggers, log_every_n_steps=1, enable_progress_bar=False)
    trainer.fit(Model(**PARAMETERS), DataLoader(data, batch_size=4), DataLoader(data, batch_size=8))
    for run in ("csv/version_0", "events/version_0"):
        logged.add_parameters(run, PARAMETERS)
