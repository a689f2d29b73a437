"""Log with torchtitan's own TensorBoard logger, in a loop of torch.

Its `Trainer` needs a GPU: it calls `torch.cuda.set_device` on every host (`torchtitan/trainer.py`).
"""

import torch
from logged_values import SEED, LoggedValues, logged_values
from torchtitan.components.metrics import LoggerContainer, TensorBoardLogger


def main(logged: LoggedValues) -> None:
    torch.manual_seed(SEED)
    run = "tb/20270115-0800"
    logger = LoggerContainer()
    logger.add_logger(TensorBoardLogger(str(logged.folder / run)))
    layer = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    for step in range(1, 11):
        inputs = torch.randn(8, 4)
        loss = torch.nn.functional.mse_loss(layer(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        values = {
            "loss_metrics/global_avg_loss": loss.item(),
            "grad_norm": norm.item(),
            "lr": optimizer.param_groups[0]["lr"],
            "memory/num_ooms": 0,
        }
        logger.log(values, step)
        logged.add(run, values, step)
    logger.close()


if __name__ == "__main__":
    with logged_values() as values:
        main(values)
