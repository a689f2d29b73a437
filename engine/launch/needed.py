"""Find a finished run that has done what a request asks for: `gputrain run --needed` starts nothing then.

Runs are the same if command or config, code and data are. What changes no result, such as the GPUs, does not count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.code.data import data_fingerprint
from engine.code.digests import CodeDigests
from engine.code.git import GitError
from engine.code.record import compare_digests, read_code_record
from engine.code.state import read_folder_code
from engine.command.spec import Command, read_command
from engine.command.user_key import KEY_FILE
from engine.config.differences import flat_values, is_neutral
from engine.config.resume import PATH_KEYS
from engine.config.schema import Config, as_dict
from engine.config.user_code import is_user_code, user_code_names
from engine.config.user_errors import code_root
from engine.launch.request import RunRequest
from engine.runs.folder import RunFolder, RunState, list_runs
from engine.runs.records import CodeSummary
from engine.runs.run_record import RunRecord, read_run_record
from engine.utils.errors import UsageError
from engine.utils.files import own_folder_advice, state_folder
from engine.utils.text import printable

OPTION = "--needed"
# What decides the result of a command, besides its code, its data and the variables of `--env`.
COMMAND_FIELDS = ("argv", "cwd", "data")


def find_finished_run(request: RunRequest) -> RunFolder | None:
    """Return the newest finished run of this user that did what is requested; None if there is none.

    Raises UsageError if that cannot be known, as outside of a git repository."""
    command = request.command
    matches = _finished_command(request, command) if command is not None else _finished_training(request)
    return max(matches, key=lambda match: match[1].updated_at or 0.0, default=(None, None))[0]


def _finished_runs(root: Path, *, is_command: bool) -> Iterator[tuple[RunFolder, RunRecord]]:
    for folder in list_runs(root):
        record = read_run_record(folder) if folder.is_own else None
        if record is not None and record.state is RunState.FINISHED and bool(record.command) is is_command:
            yield folder, record


def _finished_command(request: RunRequest, command: Command) -> Iterator[tuple[RunFolder, RunRecord]]:
    """Raises UsageError."""
    cwd = Path(command.cwd)
    current, data = _read_code(cwd, request.runs_dir), data_fingerprint([cwd / path for path in command.data])
    variables = _variables_digest(command)
    for folder, record in _finished_runs(request.runs_dir, is_command=True):
        code = record.code
        if code is None or code.data != data or not _is_same_code(folder, code, current):
            continue
        try:
            stored = read_command(folder)
        except UsageError:
            continue
        is_alike = all(getattr(stored, name) == getattr(command, name) for name in COMMAND_FIELDS)
        # Only what was typed as KEY=VALUE has placeholders.
        if is_alike and stored.variables == variables and {*stored.expanded} == {*command.expanded}:
            yield folder, record


def _variables_digest(command: Command) -> str:
    """Raises UsageError."""
    try:
        return command.variables_digest()
    except OSError as error:
        place = printable(str(state_folder() / KEY_FILE))
        reason = f"cannot compare the values of --env: {place}, the key of their digests, cannot be written"
        advice = own_folder_advice("XDG_STATE_HOME")
        raise UsageError.one(OPTION, f"{reason}: {error.strerror}", advice, code="not-writable") from error


def _finished_training(request: RunRequest) -> Iterator[tuple[RunFolder, RunRecord]]:
    """Raises UsageError."""
    from engine.launch.input_keys import with_input_keys

    config = with_input_keys(request).config
    if is_user_code(config.data.dataset):
        reason = f"cannot tell whether the data of {config.data.dataset} is the same: its code alone knows"
        raise UsageError.one(OPTION, reason, code="not-supported")
    current: CodeDigests | None = None
    if names := user_code_names(config):
        if config.run.code_packages:
            reason = f"cannot tell whether the code of installed packages is the same ({', '.join(sorted(names))})"
            raise UsageError.one(OPTION, reason, code="not-supported")
        current = _read_code(code_root(config.run.code), request.runs_dir)
    alike = [
        (folder, record)
        for folder, record in _finished_runs(request.runs_dir, is_command=False)
        if _is_same_config(config, record) and _is_same_training_code(folder, record, current)
    ]
    if not alike:
        return
    data = _training_data(config)
    for folder, record in alike:
        if _recorded_data(folder) == data:
            yield folder, record


def _read_code(cwd: Path, runs_dir: Path) -> CodeDigests:
    """Raises UsageError outside of a repository, and if it cannot be read or not be compared."""
    place = printable(str(cwd))
    try:
        state = read_folder_code(cwd, runs_dir)
    except GitError as error:
        raise UsageError.one(OPTION, f"{place} {error}", code=error.code) from error
    if state is None:
        reason = f"{place} is in no git repository, so nobody knows whether its code is the same"
        raise UsageError.one(OPTION, reason, f"run it without {OPTION}, or `git init` there", code="no-repository")
    if unknown := state.digests.unknown:
        reason = f"{printable(str(state.root))} {unknown}, so nobody knows whether its code is the same"
        advice = f"add what is no code to .gitignore, or run it without {OPTION}"
        raise UsageError.one(OPTION, reason, advice, code="not-supported")
    return state.digests


def _is_same_code(folder: RunFolder, code: CodeSummary, current: CodeDigests) -> bool:
    if code.changed or code.commit != current.commit:
        return False
    if code.fingerprint == current.fingerprint:
        return True
    record = read_code_record(folder)
    if record is None or record.digests.unknown:
        return False
    return not compare_digests(record.digests, current).message


def _is_same_training_code(folder: RunFolder, record: RunRecord, current: CodeDigests | None) -> bool:
    if record.versions.get("gputrain") != version("gputrain"):
        return False
    if current is None:
        return True
    return record.code is not None and _is_same_code(folder, record.code, current)


def _is_same_config(config: Config, record: RunRecord) -> bool:
    """Whether a run has trained with a config. It stores numbers in place of `auto`, and of a batch size that is not
    set and too large for its images."""
    values, stored = flat_values(as_dict(config)), _stored_values(record)
    if stored is None:
        return False
    for key, value in values.items():
        if is_neutral(key) or value == stored[key] or value == "auto" or _is_same_path(key, value, stored[key]):
            continue
        if key == "data.batch_size" and _is_reduced(config, record, stored[key]):
            continue
        return False
    return set(config.eval.metrics) == set(stored["eval.metrics"] or ())


def _is_same_path(key: str, value: Any, other: Any) -> bool:
    return key in PATH_KEYS and None not in (value, other) and os.path.realpath(value) == os.path.realpath(str(other))


def _stored_values(record: RunRecord) -> Mapping[str, Any] | None:
    if record.config is None:
        return None
    sections: dict[str, dict[str, Any]] = {}
    for key, value in record.config.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return flat_values(sections)


def _is_reduced(config: Config, record: RunRecord, stored: Any) -> bool:
    is_default = "batch_size" not in config.data.model_fields_set
    size, images, ranks = config.data.batch_size, record.train_images, record.ranks
    if not is_default or not isinstance(size, int) or not isinstance(stored, int) or images is None or ranks is None:
        return False
    return stored < size and images < size * ranks


def _training_data(config: Config) -> Mapping[str, Any]:
    """Return the fingerprint of each part of the data. Raises UsageError."""
    from engine.data.sampler import PARTS
    from engine.data.sources.open import open_source

    source = open_source(config)
    return {part: asdict(source.fingerprint(part)) for part in PARTS}


def _recorded_data(folder: RunFolder) -> Mapping[str, Any] | None:
    """Return the fingerprint of the data in the newest checkpoint of a run."""
    from engine.runs.checkpoint_files import read_saved_value

    try:
        return read_saved_value(folder.checkpoints, "fingerprints")
    except UsageError:
        return None
