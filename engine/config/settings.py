"""The user's settings file, `$XDG_CONFIG_HOME/gputrain/settings.yaml`: what the user allows in all runs.

It holds `run: {code_packages: [...]}`, which `engine.config.loader` merges below all other layers and
`engine.train.inference` reads for commands that take no config, `limits: {gpus: N, runs: N, hours: H}`, see
`engine.config.limits`, `reservations`, the folder of the reservations of GPUs, see `engine.gpus.reservation`, and
`hosts: [NAME, ...]`, the other hosts of `--hosts all` and `run --on any`, see `engine.jobs.hosts`. `slurm` has defaults
of `run --on slurm`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Strict

from engine.base.errors import UsageError
from engine.base.files import config_folder, own_folder_advice, settings_file, user_path_problem
from engine.config.section import PackageNames, Section
from engine.config.yaml_io import read_yaml

CONTENT = (
    "run: {code_packages: [PACKAGE, ...]}, limits: {gpus: N, runs: N, hours: H}, reservations: /FOLDER, "
    "hosts: [HOST, ...] and slurm: {partition: NAME, account: NAME, setup: [LINE, ...]}"
)


class Limits(Section):
    """Section `limits` of the settings file: the limits in force, None for each that the user has not set."""

    gpus: int | None = Field(None, ge=1, le=1024, description="GPUs that your runs on one host use at once.")
    runs: int | None = Field(
        None, ge=1, le=1024, description="Runs on GPUs, or in the queue of the CPU, that you have on one host at once."
    )
    hours: float | None = Field(
        None, gt=0, le=1e5, description="Hours of one run: the highest queue.time_limit, and its default."
    )


class RunSettings(Section):
    """Section `run` of the settings file."""

    code_packages: PackageNames = ()


class SlurmSettings(Section):
    """Section `slurm` of the settings file: what `run --on slurm` submits without options. `setup` are lines of a shell
    that the job runs first, such as `module load cuda`."""

    partition: str = ""
    account: str = ""
    setup: Annotated[tuple[str, ...], Strict(False)] = ()


class UserSettings(Section):
    """Content of the settings file."""

    run: RunSettings = RunSettings()
    limits: Limits = Limits()
    reservations: Annotated[str, Field(pattern="^/")] | None = None
    hosts: Annotated[tuple[str, ...], Strict(False)] = ()
    """As typed: `engine.jobs.hosts.channel` checks the names."""
    slurm: SlurmSettings = SlurmSettings()


def read_settings() -> UserSettings:
    """Return the user's settings, the defaults if there is no file, or no access to its folder.

    Raises UsageError if the file is invalid, or others can change it.
    """
    path = settings_file()
    try:
        path.lstat()
    except OSError:
        return UserSettings()
    # The file may be a symbolic link: programs that manage dotfiles create one.
    content, _ = read_yaml(path.resolve(), str(path))
    if (problem := user_path_problem(config_folder(), path.name)) is not None:
        reason = f"is not used, because {problem}; {own_folder_advice('XDG_CONFIG_HOME')}"
        raise UsageError.one(str(path), reason, code="foreign-writable")
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if value is not None}
    try:
        return UserSettings.model_validate(content or {})
    except ValueError as error:
        reason = f"is not valid: it may hold {CONTENT}"
        raise UsageError.one(str(path), reason, code="wrong-format") from error
