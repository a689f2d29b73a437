"""Load the checkpoint that a run resumes from on all ranks, compare config and data with it, and restore its state.

The checkpoint decides: `config.yaml` and the dataset may have been edited since. `train` calls it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor
from torch.distributed import Store

from engine.base.answers import Answer
from engine.base.codec import convert
from engine.base.errors import Problem, UsageError, collect_problems, raise_if_any
from engine.base.text import list_names
from engine.base.units import format_lr
from engine.config.resume import describe_changes, find_changes, immutable_key_problems
from engine.config.schema import Config
from engine.config.user_code import is_user_code
from engine.runs.checkpoint_files import DamagedCheckpointError
from engine.runs.folder import RunFolder
from engine.train.data.sampler import PARTS
from engine.train.data.sources.base import ImageFormat, ImageSource
from engine.train.data.sources.folder_layout import PART_NOUNS
from engine.train.data.sources.formats import model_input_format
from engine.train.distributed.messages import HostProblems, decide_on_rank_0, exchange, merge_problems
from engine.train.distributed.rank_env import RankInfo
from engine.train.loop.checkpoint import load_checkpoint, load_newest
from engine.train.loop.checkpoint_writer import CheckpointWriter, map_tensors
from engine.train.loop.data import TrainingData
from engine.train.loop.device import set_rng_state
from engine.train.loop.log import TrainingLog
from engine.train.loop.metrics import BestSoFar
from engine.train.loop.model import Model
from engine.train.optim.lr_schedule import lr_factor, scaled_lr
from engine.train.optim.optimizers import restore_optimizer

MAX_LISTED_CLASSES = 5
# A rise of the learning rate at a resume that is worth a warning.
MIN_LR_RISE = 1.1
RESTORE_DATA_ADVICE = "restore the data, or use a new name with --name to start a new run"


def load_for_resume(
    folder: RunFolder, config: Config, source: ImageSource, rank_info: RankInfo, store: Store
) -> tuple[dict[str, Any] | None, list[Problem]]:
    """Load the newest intact checkpoint, which rank 0 chooses for all ranks; None if there is no checkpoint.

    Also returns what the resumed run does not have in common with it, as warnings. Raises UsageError on
    all ranks if config or data of one of them must not differ.
    """
    checkpoint: dict[str, Any] | None = None
    damaged: list[str] = []

    def choose() -> str:
        nonlocal checkpoint, damaged
        path, checkpoint, damaged = load_newest(folder.checkpoints)
        return path.name if path else ""

    name = decide_on_rank_0("checkpoint", choose, Answer[str], rank_info, store)
    if not name:
        return None, []
    notes = [Problem("", f"checkpoint {reason}; resuming from the one before it", code="damaged") for reason in damaged]
    problems: list[Problem] = []
    with collect_problems(problems):
        path = folder.checkpoints / name
        try:
            # Rank 0 has loaded it.
            checkpoint = checkpoint or load_checkpoint(path)
        except DamagedCheckpointError as error:
            raise UsageError.one(str(path), f"{error}, but not on rank 0's host", code=error.code) from error
        notes += compare_with_checkpoint(checkpoint, config, source)
    # One found only on another host names that host.
    ranks = exchange(store, rank_info, "comparison", HostProblems(host=socket.gethostname(), problems=tuple(problems)))
    raise_if_any(merge_problems(ranks[0].problems, ranks[1:]))
    return checkpoint, notes


def compare_with_checkpoint(checkpoint: Mapping[str, Any], config: Config, source: ImageSource) -> list[Problem]:
    """Return a warning for each difference from the checkpoint. Raises UsageError for those that resume forbids."""
    changes = find_changes(checkpoint["config"], config)
    raise_if_any(immutable_key_problems(changes))
    _check_format(checkpoint, config, source)
    return [*describe_changes(changes), *_compare_images(checkpoint, config, source)]


def describe_lr_rise(
    saved: Mapping[str, Any], config: Config, step: int, steps_per_epoch: int, num_devices: int
) -> list[Problem]:
    """Return a warning if more epochs stretch the schedule, so that the learning rate rises after `step`, where the run
    resumes. `saved` is the config of the checkpoint."""
    changes = {key: before for key, before, _ in find_changes(saved, config)}
    epochs, schedule = changes.get("run.epochs"), config.schedule
    is_chosen = any(key.startswith("schedule.") or key in ("optim.lr", "optim.lr_scaling") for key in changes)
    if not isinstance(epochs, int) or epochs < 1 or step < 1 or is_chosen or is_user_code(schedule.name):
        return []
    before = lr_factor(schedule, step, steps_per_epoch, epochs)
    stretched, after = (lr_factor(schedule, each, steps_per_epoch, config.run.epochs) for each in (step, step + 1))
    # At the same step, so that a warmup does not count.
    if not 0 < before * MIN_LR_RISE < min(stretched, after):
        return []
    peak = scaled_lr(config.optim, num_devices)
    reason = (
        f"the learning rate rises from {format_lr(before * peak)} to {format_lr(after * peak)}, because schedule "
        f"{schedule.name} now spans {config.run.epochs} epochs"
    )
    advice = f"optim.lr={config.optim.lr * before / after:.3g} continues at {format_lr(before * peak)}"
    return [Problem("", reason, advice, code="resume-differs")]


def _data_error(config: Config, reason: str) -> UsageError:
    location = "data.dataset" if config.data.path is None else "data.path"
    return UsageError.one(
        location, f"the data has changed since the checkpoint: {reason}", RESTORE_DATA_ADVICE, code="data-changed"
    )


def _check_format(checkpoint: Mapping[str, Any], config: Config, source: ImageSource) -> None:
    """Raises UsageError if the classes, or the size or channels of the model's input, are not the checkpoint's."""
    saved_classes, classes = list(checkpoint["classes"]), list(source.classes)
    if saved_classes != classes:
        lists = {"new": set(classes) - set(saved_classes), "missing": set(saved_classes) - set(classes)}
        details = [f"{word} {list_names(sorted(names), MAX_LISTED_CLASSES)}" for word, names in lists.items() if names]
        raise _data_error(config, f"its classes differ ({', '.join(details) or 'in another order'})")
    saved, current = convert(checkpoint["image_format"], ImageFormat), model_input_format(config, source)
    shape, saved_shape = (f"{images.channels}x{images.size}x{images.size}" for images in (current, saved))
    if shape != saved_shape:
        raise _data_error(config, f"its images are {shape} instead of {saved_shape}")
    if replace(current, mean=(), std=()) != replace(saved, mean=(), std=()):
        evaluation, saved_evaluation = current.describe_evaluation(), saved.describe_evaluation()
        raise _data_error(config, f"the evaluation uses {evaluation} instead of {saved_evaluation}")


def _compare_images(checkpoint: Mapping[str, Any], config: Config, source: ImageSource) -> list[Problem]:
    """Compare number, names, labels and file sizes of the images with the checkpoint's.

    Returns a warning if only file sizes differ. Raises UsageError for other differences.
    """
    differences, resized = list[str](), list[str]()
    for part, saved_count in zip(PARTS, checkpoint["images"], strict=True):
        noun, saved, count = PART_NOUNS[part], checkpoint["fingerprints"][part], source.num_images(part)
        current = asdict(source.fingerprint(part))
        changed = {key for key, digest in current.items() if digest and saved[key] and saved[key] != digest}
        if count != saved_count:
            differences.append(f"it has {count} {noun} images instead of {saved_count}")
        elif other := [key for key in ("names", "labels") if key in changed]:
            differences.append(f"the {noun} images have other {other[0]}")
        elif "sizes" in changed:
            resized.append(noun)
    if differences:
        skipped = f" (skipped: {list_names(source.skipped, MAX_LISTED_CLASSES)})" if source.skipped else ""
        raise _data_error(config, ", ".join(differences) + skipped)
    if not resized:
        return []
    reason = f"the files of the {' and '.join(resized)} images have other sizes than at the checkpoint"
    return [Problem("", reason, code="data-changed")]


def restore_state(
    checkpoint: dict[str, Any], data: TrainingData, model: Model, log: TrainingLog, checkpoints: CheckpointWriter
) -> list[Problem]:
    """Restore the training state from a checkpoint, except model and position, which are built from it.

    With another number of ranks, rank 0 takes the metrics of all ranks, and random number generators are seeded again.
    Returns warnings about what differs from an uninterrupted run.
    """
    ranks, warnings, metrics, sampler = checkpoint["ranks"], list[Problem](), log.train_metrics, data.sampler
    # Copies, because optimizers keep the tensors that they are given, and these are pages of the checkpoint file.
    restore_optimizer(model.optimizer, map_tensors(checkpoint["optimizer"], Tensor.clone), model.config.optim)
    if checkpoint["scaler"] and model.scaler.is_enabled():
        model.scaler.load_state_dict(checkpoint["scaler"])
    model.plateau.load_state_dict(checkpoint["plateau"])
    log.early_stop.load_state_dict(checkpoint["early_stop"])
    if checkpoint["ema"] is not None and model.ema is not None:
        model.ema.network.load_state_dict(checkpoint["ema"])
    log.skipped.total, log.skipped.consecutive = checkpoint["skipped"], checkpoint["consecutive_skipped"]
    log.lr = model.lr_at(data.steps_seen())
    # Older checkpoints lack the loss.
    best_loss = checkpoint.get("best_loss")
    log.best = BestSoFar(log.monitor, checkpoint["best_epoch"], checkpoint["best_accuracy"], best_loss)
    checkpoints.last_saved_step = checkpoint["step"]
    same_ranks = len(ranks) == sampler.world_size
    if same_ranks:
        local = ranks[sampler.rank]
        metrics.loss_sum += local["loss_sum"].to(model.device)
        metrics.counts += local["counts"].to(model.device)
        log.restore_unreported(local["unreported"])
        set_rng_state(local["rng"], model.device)
    elif sampler.rank == 0:
        metrics.loss_sum += sum(saved_rank["loss_sum"] for saved_rank in ranks).to(model.device)
        metrics.counts += sum(saved_rank["counts"] for saved_rank in ranks).to(model.device)
    if (checkpoint["ema"] is None) != (model.ema is None):
        reason = (
            "the EMA weights start from the current weights"
            if model.ema is not None
            else "the EMA weights, which the best epoch so far was chosen by, are dropped"
        )
        warnings.append(Problem("", reason, code="resume-differs"))
    if model.config.device.parallel == "dp" and model.device.type == "cuda":
        reason = "with device.parallel=dp only the random number generator of the first GPU is restored"
        warnings.append(Problem("", reason, code="resume-differs"))
    if checkpoint["tf32"] != model.uses_tf32:
        reason = f"float32 math {'now uses TF32' if model.uses_tf32 else 'does not use TF32 any more'}"
        warnings.append(Problem("", reason, code="resume-differs"))
    saved, current = (len(ranks), checkpoint["global_batch"]), (sampler.world_size, sampler.global_batch)
    if saved == current:
        return warnings
    differences = [] if saved[1] == current[1] else ["the images of each batch"]
    differences += [] if same_ranks else ["the model's random numbers", "the step losses not reported yet"]
    reason = (
        f"the checkpoint has {saved[0]} ranks and a global batch size of {saved[1]}, this run has {current[0]} and "
        f"{current[1]}: {', '.join(differences)} and the order of summation now differ from an uninterrupted run"
    )
    return [*warnings, Problem("", reason, code="resume-differs")]
