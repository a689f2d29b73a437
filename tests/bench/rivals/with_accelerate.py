"""Training with Hugging Face Accelerate; started by torchrun."""

from __future__ import annotations

import sys
import time

import torch
import torch.nn.functional as F
import work
from accelerate import Accelerator
from torch.utils.data import DataLoader


def main(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    train_set, val_set = work.datasets(folder)
    loader = DataLoader(
        train_set, work.BATCH, shuffle=True, num_workers=work.WORKERS, persistent_workers=True, drop_last=True
    )
    val_loader = DataLoader(val_set, work.BATCH)
    model = work.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=work.LR, momentum=work.MOMENTUM)
    model, optimizer, loader, val_loader = accelerator.prepare(model, optimizer, loader, val_loader)
    epochs = []
    for _ in range(work.EPOCHS):
        start = time.perf_counter()
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
        epochs.append(time.perf_counter() - start)
        model.eval()
        right = images_seen = 0
        with torch.no_grad():
            for images, labels in val_loader:
                answers, labels = accelerator.gather_for_metrics((model(images).argmax(1), labels))
                right += int((answers == labels).sum())
                images_seen += len(labels)
    if accelerator.is_main_process:
        work.print_epochs(epochs)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
