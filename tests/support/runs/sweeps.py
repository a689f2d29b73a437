"""Create the folder of a sweep with trials in any state, without training."""

from __future__ import annotations

from pathlib import Path

from engine.jobs.sweeps.folder import SweepFolder
from engine.jobs.sweeps.settings import SweepSettings, write_settings
from engine.jobs.sweeps.study import SweepStudy, open_study
from support.replace import replace
from support.runs.event_factories import make_epoch, make_run_started
from support.runs.factories import make_run_folder

SETTINGS = SweepSettings(
    config="digits",
    space={"optim.lr": "log:1e-3..1", "optim.name": "sgd,adamw", "augment.crop_padding": "0..4"},
    trials=12,
    parallel=2,
)


def make_sweep(root: Path, settings: SweepSettings = SETTINGS, name: str = "s") -> SweepFolder:
    """Create a sweep without trials."""
    folder = SweepFolder(root / name)
    folder.path.mkdir(parents=True)
    write_settings(folder.settings, settings)
    return folder


def make_finished_trials(root: Path, count: int = 9, name: str = "s") -> tuple[SweepFolder, SweepStudy]:
    """Create a sweep with trials that are complete, pruned, failed and not ended, and their runs."""
    folder = make_sweep(root, name=name)
    study = open_study(folder, SETTINGS, create=True)
    for number in range(count):
        lr, optimizer = 0.1 if number == 0 else 10 ** -((number % 5) / 2) * 0.7, ("sgd", "adamw")[number % 2]
        params = {"optim.lr": lr, "optim.name": optimizer, "augment.crop_padding": number % 5}
        study.add(params, {"preset": number == 0})
        value = 0.95 - abs(lr - 0.07) / 2
        make_run_folder(root, f"{name}-{number:03d}", replace(make_run_started(), epochs=9), make_epoch(1, value))
        study.report(number, 1, value)
        if number == count - 1:
            continue
        if number == 3:
            study.end(number, "PRUNED", reason="pruned after epoch 1", code="stopped")
        elif number == 5:
            study.end(number, "FAIL", reason="rank 0: the loss is not finite", code="non-finite")
        else:
            study.report(number, 2, value)
            study.end(number, "COMPLETE", value)
    return folder, study
