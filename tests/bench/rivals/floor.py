"""Lower bound: the same steps on tensors in memory, without loading, cropping, shuffling or evaluation."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
import work
from torch import Tensor
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def batches(folder: str, rank: int) -> list[tuple[Tensor, Tensor]]:
    train_set, _ = work.datasets(folder)
    rank_images = [train_set[index] for index in range(rank, work.TRAIN, work.RANKS)]
    images, labels = torch.stack([image for image, _ in rank_images]), torch.tensor([label for _, label in rank_images])
    return list(zip(images.split(work.BATCH), labels.split(work.BATCH), strict=True))[: len(rank_images) // work.BATCH]


def train(rank: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=work.RANKS)
    ready = batches(folder, rank)
    model = DistributedDataParallel(work.network(), gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=work.LR, momentum=work.MOMENTUM, fused=True)
    model.train()
    epochs = []
    for _ in range(work.EPOCHS):
        dist.barrier()
        start = time.perf_counter()
        for images, labels in ready:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        epochs.append(time.perf_counter() - start)
    if rank == 0:
        work.print_epochs(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, (sys.argv[1], work.free_port()), nprocs=work.RANKS)
