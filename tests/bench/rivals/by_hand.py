"""Hand-written DistributedDataParallel training with `torch.multiprocessing.spawn`."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
import work
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=work.RANKS)
    train_set, val_set = work.datasets(folder)
    sampler = DistributedSampler(train_set, drop_last=True)
    loader = DataLoader(
        train_set, work.BATCH, sampler=sampler, num_workers=work.WORKERS, persistent_workers=True, drop_last=True
    )
    val_loader = DataLoader(val_set, work.BATCH, sampler=DistributedSampler(val_set, shuffle=False))
    model = DistributedDataParallel(work.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=work.LR, momentum=work.MOMENTUM)
    epochs = []
    for epoch in range(work.EPOCHS):
        start = time.perf_counter()
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        epochs.append(time.perf_counter() - start)
        model.eval()
        counts = torch.zeros(2)
        with torch.no_grad():
            for images, labels in val_loader:
                right = (model(images).argmax(1) == labels).sum()
                counts += torch.tensor([right.item(), len(labels)])
        dist.all_reduce(counts)
    if rank == 0:
        work.print_epochs(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1], work.free_port()), nprocs=work.RANKS)
