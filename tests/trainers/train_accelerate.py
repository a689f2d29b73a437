"""Train with accelerate, with its trackers for TensorBoard and W&B."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from logged_values import SEED, LoggedValues, logged_values

PARAMETERS = {"lr": 0.05, "batch_size": 4, "name": "tiny"}


def main(logged: LoggedValues) -> None:
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(logged.folder), "WANDB_SILENT": "true"}
    set_seed(SEED)
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", "wandb"], project_dir=logged.folder)
    accelerator.init_trackers("tiny", config=PARAMETERS)
    layer = torch.nn.Linear(4, 1)
    layer, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=PARAMETERS["lr"]))
    run = accelerator.get_tracker("wandb").tracker
    wandb_run = str(Path(run.dir).parent.relative_to(logged.folder))
    for step in range(12):
        inputs = torch.randn(PARAMETERS["batch_size"], 4)
        loss = torch.nn.functional.mse_loss(layer(inputs), inputs.sum(1, keepdim=True))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        values = {"train/loss": loss.item(), "epoch": step // 4}
        accelerator.log(values, step=step)
        logged.add("tiny", values, step)
        # The column of epochs is no metric.
        logged.add(wandb_run, {"train/loss": loss.item()}, step)
    accelerator.end_training()
    for name in ("tiny", wandb_run):
        logged.add_parameters(name, PARAMETERS)


if __name__ == "__main__":
    with logged_values() as values:
        main(values)
