"""Log an offline run of W&B: nested configuration and values, steps that are left out, and a value that is late."""

# Needs: wandb
from pathlib import Path

import wandb
from logged_values import LoggedValues

PARAMETERS = {"lr": 0.05, "model": {"name": "tiny", "width": 8}}


def main(logged: LoggedValues) -> None:
    run = wandb.init(
        project="tiny", dir=logged.folder, config=PARAMETERS, mode="offline", settings=wandb.Settings(silent=True)
    )
    name = str(Path(run.dir).parent.relative_to(logged.folder))
    for step in range(0, 24, 2):
        values = {"train/loss": 1 / (step + 1), "lr": 0.05}
        run.log(values, step=step)
        if step % 6 == 0:
            run.log({"val": {"loss": 2 / (step + 1)}}, step=step)
            values |= {"val.loss": 2 / (step + 1)}
        logged.add(name, values, step)
    run.config.update({"note": "late"})
    run.finish()
    logged.add_parameters(name, {"lr": 0.05, "model.name": "tiny", "model.width": 8, "note": "late"})
