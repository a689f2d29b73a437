"""Train in a loop of accelerate that prints its loss below a bar of tqdm, as its examples do."""

import argparse
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tqdm.auto import tqdm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=0.1)
    parser.add_argument("--num_epochs", type=int, default=3)
    arguments = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator()
    layer = torch.nn.Linear(4, 1)
    layer, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=arguments.learning_rate))
    for epoch in range(arguments.num_epochs):
        total = 0.0
        for _ in tqdm(range(20), disable=not accelerator.is_local_main_process):
            time.sleep(0.05)
            inputs = torch.randn(8, 4)
            loss = torch.nn.functional.mse_loss(layer(inputs), inputs.sum(1, keepdim=True))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        accelerator.print(f"epoch {epoch}: {{'accuracy': {1 - total / 40:.4f}, 'loss': {total / 20}}}")


if __name__ == "__main__":
    main()
