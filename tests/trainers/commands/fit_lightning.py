"""Train with Lightning: its default logger, which writes a CSV file, and its default progress bar."""

import argparse
import time

import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        time.sleep(0.05)
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1]), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--max-epochs", type=int, default=3)
    arguments = parser.parse_args()
    inputs = torch.randn(160, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = Trainer(max_epochs=arguments.max_epochs, accelerator="cpu", log_every_n_steps=5)
    trainer.fit(Model(arguments.lr), DataLoader(data, batch_size=8), DataLoader(data, batch_size=40))


if __name__ == "__main__":
    main()
