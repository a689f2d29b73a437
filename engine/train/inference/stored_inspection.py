"""The stored inspection of a run, as long as checkpoint and data are those of a request. Imports no torch.

`gputrain evaluate --list` asks here before it evaluates with `engine.train.inference.inspect`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.base.codec import InvalidRecordError
from engine.base.errors import Problem, UsageError
from engine.config.data_sections import ENCODED_DATASETS
from engine.config.loader import validate_config
from engine.runs.checkpoint_files import DamagedCheckpointError, read_digest
from engine.runs.folder import RunFolder
from engine.runs.inspection import Inspection, InspectionInfo, PartName, read_inspection, write_inspection
from engine.train.data.sampler import PARTS
from engine.train.data.sources.open import open_source


@dataclass(frozen=True)
class InspectionRequest:
    """What to inspect.

    `digest` is the SHA-256 of the checkpoint file, read before the file is loaded. `raw` and `part` are --no-ema and
    --split, `overrides` those of `evaluate_checkpoint`.
    """

    digest: str
    raw: bool = False
    overrides: tuple[str, ...] = ()
    part: PartName = "val"


def checkpoint_digest(path: Path) -> str:
    """Return the SHA-256 of a checkpoint; "" for one that cannot be read, which the evaluation then refuses."""
    with suppress(DamagedCheckpointError, OSError):
        return read_digest(path)
    return ""


def find_stored(run: RunFolder, request: InspectionRequest) -> Inspection | None:
    """Return the stored inspection of a run if it answers a request, else None.

    Encoded image files are compared with those that were evaluated. Other datasets do not change, or only their code
    knows.
    """
    try:
        inspection = read_inspection(run)
    except InvalidRecordError:
        return None
    if inspection is None or not inspection.info.covers(request.part):
        return None
    info = inspection.info
    if (info.digest, info.raw, info.overrides) != (request.digest, request.raw, request.overrides):
        return None
    return inspection if info.dataset not in ENCODED_DATASETS or _has_same_files(info) else None


def _has_same_files(info: InspectionInfo) -> bool:
    """Whether the dataset of an inspection still has the same images: names, labels and sizes."""
    try:
        config = validate_config({"data": dict(info.data), "run": {"seed": info.seed}})
        # Another user may have written the inspection: it must not name code or a download.
        source = open_source(config) if config.data.dataset in ENCODED_DATASETS else None
    except UsageError:
        return False
    return source is not None and all(
        asdict(source.fingerprint(part)) == info.fingerprints[part] for part in PARTS if part in info.fingerprints
    )


def keep_inspection(run: RunFolder, inspection: Inspection) -> Problem | None:
    """Store an inspection in the folder of its run. Return why it is not kept; None if it is."""
    if not run.is_of_this_user:
        return Problem("", f"the result is not kept: {run.path} belongs to another user", code="foreign-owner")
    try:
        run.restrict_umask()
        write_inspection(run, inspection)
    except OSError as error:
        reason = f"the result is not kept: {run.path} cannot be written to ({error.strerror})"
        return Problem("", reason, code="not-writable")
    return None
