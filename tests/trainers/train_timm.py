"""Train a model of timm in the loop of its `train.py`, which is no part of the package, and resume it."""

# Needs: timm
import timm
import torch
import yaml
from logged_values import SEED, LoggedValues
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter, random_seed, update_summary
from timm.utils.summary import trim_summary

PARAMETERS = {"model": "test_vit", "lr": 0.01, "opt": "adamw", "img_size": 160, "epochs": 6}


def main(logged: LoggedValues) -> None:
    output = logged.folder / "test_vit-160"
    output.mkdir()
    (output / "args.yaml").write_text(yaml.safe_dump(PARAMETERS, default_flow_style=False))
    random_seed(SEED)
    model = timm.create_model(str(PARAMETERS["model"]), num_classes=2)
    optimizer = create_optimizer_v2(model, opt=PARAMETERS["opt"], lr=PARAMETERS["lr"])
    images, labels = torch.randn(4, 3, 160, 160), torch.tensor([0, 1, 0, 1])
    summary = str(output / "summary.csv")
    # The run resumes at the fourth epoch, which it had finished.
    for start_epoch, end_epoch in ((0, 4), (3, 6)):
        trim_summary(summary, start_epoch)
        for epoch in range(start_epoch, end_epoch):
            losses = AverageMeter()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.update(loss.item(), len(images))
            evaluation = {"loss": losses.avg / 2, "top1": 25.0 * (epoch % 4)}
            update_summary(epoch, {"loss": losses.avg}, evaluation, filename=summary, lr=PARAMETERS["lr"])
            values = {"train_loss": losses.avg, "eval_loss": evaluation["loss"], "eval_top1": evaluation["top1"]}
            logged.add(output.name, values, epoch)
    logged.add_parameters(output.name, PARAMETERS)
