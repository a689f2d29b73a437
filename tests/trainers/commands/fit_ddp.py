"""Train with DistributedDataParallel on CPU, in the shape of PyTorch's DDP tutorial."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(256, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(data, arguments.batch_size, sampler=DistributedSampler(data), num_workers=1)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr)
    for epoch in range(arguments.total_epochs):
        for batch, targets in loader:
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        clock = f"clock: {time.time():.3f}"
        print(
            f"[GPU{os.environ['LOCAL_RANK']}] Epoch {epoch} | Steps: {len(loader)} | Loss: {loss.item():.6f} | {clock}"
        )
        time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
