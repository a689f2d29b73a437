"""The config of a run from its request to its ranks: every change of it, in this order.

`settle_request`, before anything is reserved or claimed:

1. A run whose wait was interrupted waits again (`device.wait`).
2. The input keys are those of the pretrained weights, or of the resumed run, whose precision stays too (`input_keys`).
3. User code is that in the copy of the resumed run (`run.snapshot`).

`settle_config`, with the devices and the folder of the run:

4. `data.batch_size` and `precision.amp` are what the preflight chose, on other hosts what rank 0 chose.
5. A batch size that the ranks found before stands in place of `auto`.
6. The run has its name, and is no request to resume any more.
7. User code is that in the copy that the run made; the stored config names the original.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.launch.request import RunRequest
from engine.launch.run_code import RunCode, stored_code
from engine.queue.state import is_interrupted
from engine.runs.folder import RunFolder


@dataclass(frozen=True)
class SettledConfig:
    """The config of a run: as its ranks use it, and as its folder stores it for a run that repeats it."""

    used: Config
    stored: Config


def settle_request(request: RunRequest) -> RunRequest:
    """Return a request with what only the files of its run change in its config. The command of another program gets
    its copy of the code when it starts."""
    folder = request.resumed_folder
    if folder is not None and is_interrupted(folder):
        request = replace(request, config=request.config.with_values(device={"wait": True}))
    if request.command is not None:
        return request
    # A command waits in memory for days, and has no input.
    from engine.launch.input_keys import with_input_keys

    request = with_input_keys(request)
    place = stored_code(folder).copied_folder(folder) if folder is not None and request.config.run.snapshot else None
    if place is not None:
        request = replace(request, config=request.config.with_values(run={"code": str(place)}))
    return request


def settle_config(
    config: Config, folder: RunFolder, code: RunCode, *, is_resumed: bool, is_training: bool = True
) -> SettledConfig:
    """Return the config of a run in a folder. `is_resumed` says whether it has trained there before."""
    if config.data.batch_size == "auto" and is_resumed and folder.config.exists():
        # Only read: no code that it names runs.
        size = resolve_config(str(folder.config), trust_code=True).config.data.batch_size
        config = config.with_values(data={"batch_size": size})
    config = config.with_values(run={"name": folder.name, "resume": False})
    record, place = code.record, code.copied_folder(folder)
    if record is None or place is None or not is_training:
        return SettledConfig(config, config)
    original = Path(record.root, record.folder)
    return SettledConfig(*(config.with_values(run={"code": str(path)}) for path in (place, original)))
