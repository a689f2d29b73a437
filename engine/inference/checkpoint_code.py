"""What of a checkpoint's config is used: its user code only if the config of the user's own run names it too.

A checkpoint is data: anybody can write one that names any code, or any number of DataLoader workers. `trained_model`
calls `limit_to_run`.
"""

from __future__ import annotations

from pathlib import Path

from engine.config.loader import ConfigError, resolve_config
from engine.config.schema import Config
from engine.config.settings import read_code_packages
from engine.config.user_code import user_code_names
from engine.runs.folder import RunFolder
from engine.utils.errors import UsageError
from engine.utils.trust import describe_user, foreign_reason

# Keys of data that a checkpoint could set to fill the memory or to start any number of processes.
LOADING_KEYS = ("batch_size", "workers", "worker_type", "prefetch", "on_bad", "fake_train", "fake_val")


def limit_to_run(config: Config, checkpoint: Path, folder: RunFolder) -> tuple[Config, dict[str, str]]:
    """Limit the config of a checkpoint to what the config of the run in `folder` allows.

    The folder of user code, the arguments of code that the run names too, and how images are loaded come from the run.
    Nothing is downloaded. Also returns why each other key names code that is not the user's, see `CodeTrust.foreign`.
    Raises UsageError if the user's settings cannot be read.
    """
    run_config, foreign_in_run = _run_config(folder)
    foreign_folder = None if (problem := folder.owner_problem()) is None else f"{folder.path} {problem}"
    run_names, foreign = user_code_names(run_config), dict[str, str]()
    for key, names in user_code_names(config).items():
        if run_names.get(key) != names:
            owner, config_file = _owner(checkpoint), folder.config
            foreign[key] = f"{checkpoint}, which {owner}, names it, but {config_file} does not"
        elif (reason := foreign_folder or foreign_in_run.get(key) or foreign_in_run.get("run.code")) is not None:
            foreign[key] = reason
    run = config.run.model_copy(update={"code": run_config.run.code, "code_packages": read_code_packages()})
    loading = {key: getattr(run_config.data, key) for key in LOADING_KEYS}
    model, data = config.model, config.data.model_copy(update={"download": False, **loading})
    if "model.name" in run_names.keys() - foreign.keys():
        model = model.model_copy(update={"options": run_config.model.options})
    if "data.dataset" in run_names.keys() - foreign.keys():
        data = data.model_copy(update={"path": run_config.data.path})
    return config.model_copy(update={"run": run, "model": model, "data": data}), foreign


def _run_config(folder: RunFolder) -> tuple[Config, dict[str, str]]:
    """Return the config of a run, without what is invalid, and why some of its code is not the user's."""
    try:
        resolved = resolve_config(str(folder.config), trust_code=True)
    except ConfigError as error:
        return error.valid_part, {}
    except UsageError:
        return Config(), {}
    return resolved.config, dict(resolved.foreign_code)


def _owner(path: Path) -> str:
    try:
        status = path.stat()
    except OSError as error:
        return f"cannot be examined: {error.strerror}"
    return foreign_reason(status) or f"belongs to {describe_user(status.st_uid)}"
