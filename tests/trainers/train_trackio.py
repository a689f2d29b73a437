"""Log two runs with trackio to a local database."""

# Needs: trackio
import os

from logged_values import LoggedValues

PARAMETERS = {"lr": 0.05, "model": {"name": "tiny"}}


def main(logged: LoggedValues) -> None:
    os.environ |= {"TRACKIO_DIR": str(logged.folder), "HF_HUB_OFFLINE": "1"}
    import trackio

    for name in ("first", "second"):
        run = f"{logged.folder.name}/flowers/{name}"
        trackio.init(project="flowers", name=name, config=PARAMETERS, embed=False)
        for step in range(6):
            values = {"train/loss": 1 / (step + 1), "lr": 0.05}
            trackio.log(values, step=step)
            logged.add(run, values, step)
        trackio.finish()
        logged.add_parameters(run, {"lr": 0.05, "model.name": "tiny"})
