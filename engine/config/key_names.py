"""Find the config key that a user means: names of other libraries, other sections, misspelled names, removed keys.

`engine.config.loader`, `engine.config.messages` and the command line name it in their messages about unknown keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.base.errors import nearest
from engine.config.schema import fields, sections

# What PyTorch, torchvision, timm, Keras, Lightning, Hugging Face and Ultralytics call a key whose name here is another.
# A section stands for the key that most users set in it.
SYNONYMS = {
    "run.epochs": ("max_epochs", "n_epochs", "num_epochs", "num_train_epochs"),
    "run.seed": ("manual_seed", "random_seed"),
    "run.early_stop": ("early_stopping", "early_stopping_patience"),
    "device.gpus": ("accelerator", "cuda", "device", "device_ids", "devices", "gpu", "gpu_ids", "gpus_per_node"),
    "device.ranks": ("nproc", "nproc_per_node", "world_size"),
    "data.dataset": ("data", "dataset_name"),
    "data.path": ("data_dir", "data_path", "data_root", "dataset_path", "root", "train_dir"),
    "data.val_path": ("val_dir", "valid_dir"),
    "data.batch_size": ("batch", "bs", "per_device_train_batch_size", "train_batch_size"),
    "data.workers": ("dataloader_num_workers", "num_workers"),
    "data.image_size": ("crop_size", "img_size", "imgsz", "input_size", "resolution", "size", "train_crop_size"),
    "data.num_classes": ("classes", "nb_classes", "nc"),
    "task.name": ("problem_type", "task", "task_type"),
    "augment.policy": ("aa", "augment", "augmentation", "auto_augment"),
    "augment.flip": ("fliplr", "hflip"),
    "augment.erasing": ("random_erase", "random_erasing", "reprob"),
    "model.name": ("arch", "architecture", "backbone", "model", "model_name", "net", "network"),
    "model.weights": ("checkpoint_path", "finetune", "init_checkpoint", "pretrained"),
    "model.ema": ("ema_decay", "model_ema", "model_ema_decay"),
    "model.sync_bn": ("sync_batchnorm", "syncbn"),
    "loss.name": ("criterion", "loss", "loss_fn", "loss_function"),
    "loss.label_smoothing": ("smoothing",),
    "optim.name": ("opt", "optim", "optimiser", "optimizer"),
    "optim.lr": ("base_lr", "init_lr", "initial_lr", "learning_rate", "lr0"),
    "optim.weight_decay": ("l2", "wd"),
    "optim.clip_norm": ("clip_grad", "clip_grad_norm", "grad_clip", "gradient_clip_val", "max_grad_norm"),
    "optim.accumulate": (
        *("accum_steps", "accumulate_grad_batches", "grad_accum", "grad_accum_steps"),
        "gradient_accumulation_steps",
    ),
    "schedule.name": ("lr_schedule", "lr_scheduler", "lr_scheduler_type", "sched", "schedule", "scheduler"),
    "schedule.warmup_epochs": ("lr_warmup_epochs", "warmup"),
    "schedule.warmup_steps": ("num_warmup_steps",),
    "schedule.milestones": ("decay_milestones", "lr_steps"),
    "schedule.gamma": ("decay_rate", "lr_gamma"),
    "schedule.step_size": ("lr_step_size",),
    "precision.amp": ("bf16", "fp16", "half", "mixed_precision", "precision"),
    "checkpoint.keep": ("save_top_k", "save_total_limit"),
}


class RemovedKey(NamedTuple):
    """A key of earlier versions, whose config files hold its default, and what holds now."""

    default: Any
    reason: str


REMOVED_KEYS = {
    "optim.muon_conv": RemovedKey("off", "Muon trains matrices, and AdamW the other parameters"),
    "data.shuffle": RemovedKey("full", "all training images are shuffled"),
    "data.decoder": RemovedKey("auto", "JPEG files are decoded on the CPU"),
    "device.numa": RemovedKey("auto", "no rank is bound to a NUMA node"),
    "queue.backfill": RemovedKey(0.0, "a later run does not start before a run that waits for the same GPUs"),
}
_KEY_OF_SYNONYM = {synonym: key for key, synonyms in SYNONYMS.items() for synonym in synonyms}


def find_keys(word: str) -> list[str]:
    """Return the keys that are named by `word`, a `section.key` of any section or a bare name, or by a synonym."""
    keys = _all_keys()
    folded = word.casefold().replace("-", "_")
    name = folded.rpartition(".")[2]
    synonym = _KEY_OF_SYNONYM.get(name, "")
    if folded in keys:
        return [folded]
    return [synonym] if synonym in keys else [key for key in keys if _name(key) == name]


def key_hint(word: str) -> str:
    """Return `; did you mean KEY?` for an unknown key, or an empty string if no key is close."""
    keys, found = _all_keys(), find_keys(word)
    section, _, name = word.rpartition(".")
    if word in sections():
        # Without a key that stands for it, all its keys are equally likely.
        return f"; did you mean {found[0]}?" if found else ""
    if not found and section not in sections() and (near := nearest(section, sections())) is not None:
        found = [key for key in keys if key == f"{near}.{name}"]
    # Names alone: two keys of a section have its name in common.
    for candidates in ([key for key in keys if key.startswith(f"{section}.")], keys):
        if not found and (near := nearest(name, map(_name, candidates))) is not None:
            found = [key for key in candidates if _name(key) == near]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _all_keys() -> list[str]:
    return [key for key, _ in fields()]


def _name(key: str) -> str:
    return key.partition(".")[2]
