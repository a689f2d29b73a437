"""The config sections about a run and its machine: `run`, `device` and `checkpoint`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.config.section import RUN_NAME_PATTERN, GpuSelection, Section, Text


class RunConfig(Section):
    name: Annotated[Text, Field(pattern=RUN_NAME_PATTERN, max_length=100)] | None = Field(
        None, description="Name of the run and of its folder; made from the config's name and a number when left out."
    )
    epochs: int = Field(10, ge=1, le=10**9, description="Times that training goes through the data.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the split, the order, the augmentation and the model.")
    resume: bool = Field(False, description="Continue the run of this name from its last checkpoint, if it exists.")
    code: Text | None = Field(
        None,
        description="Folder that code of your own (module:name) is imported from; where gputrain is started when left "
        "out.",
    )
    log_every: int = Field(10, ge=1, description="Steps between two `step` events.")
    watchdog: float = Field(
        600.0,
        ge=0,
        description="Seconds without a step of any rank after which the run fails; 0 for no limit. To be more than the "
        "longest step or save takes.",
    )
    max_restarts: int = Field(
        0,
        ge=0,
        description="Times that a run whose rank failed is started again from its last checkpoint; under torchrun its "
        "own --max-restarts counts.",
    )
    requeue: bool = Field(
        False,
        description="Put the SLURM job back into the queue when SIGUSR1 (sbatch --signal=USR1@60) stops the run. "
        "Includes run.resume.",
    )


class DeviceConfig(Section):
    gpus: GpuSelection = Field(
        "auto",
        min_length=1,
        description="GPUs to train on: auto (those that nobody computes on, else the CPU), all, cpu, free:N, "
        "indices such as 0,2, or UUIDs.",
    )
    wait: bool = Field(False, description="Wait until the GPUs are free, and take them in turn with others who wait.")
    ranks: int = Field(1, ge=1, description="Processes that train when on the CPU; on GPUs there is one for each.")
    launcher: Literal["auto", "spawn", "env", "slurm"] = Field(
        "auto", description="Who starts the ranks: gputrain itself (spawn), torchrun (env), srun (slurm), or found out."
    )
    deterministic: bool = Field(False, description="Only deterministic algorithms: the same bits each time, slower.")
    cudnn_benchmark: bool = Field(True, description="Let cuDNN try its algorithms and keep the fastest.")
    timeout: float = Field(600.0, gt=0, description="Seconds that a rank waits for another before the run fails.")
    parallel: Literal["ddp", "dp"] = Field(
        "ddp",
        description="One process for each GPU (ddp), or torch's DataParallel in one process for all of them (dp), for "
        "comparison.",
    )
    backend: Literal["auto", "nccl", "gloo"] = Field(
        "auto", description="How ranks exchange gradients: nccl, gloo, or what suits the devices (auto)."
    )
    init_method: Text = Field(
        "auto",
        min_length=1,
        description="How ranks find each other: auto, env://, tcp://HOST:PORT or file:///PATH.",
    )
    bucket_view: bool = Field(
        True, description="Let gradients be views into the buckets that ddp sends, which saves a copy of them."
    )
    static_graph: bool = Field(
        False, description="Tell ddp that every step uses the same parameters in the same order, which saves it work."
    )
    empty_cache: bool = Field(False, description="Give cached GPU memory back to the driver after each evaluation.")


class CheckpointConfig(Section):
    keep: int = Field(3, ge=1, description="Newest checkpoints kept beside the best.")
    every_epochs: int = Field(
        1, ge=1, description="Epochs between two checkpoints; the best so far and the last are saved as well."
    )
    every_steps: int = Field(0, ge=0, le=10**9, description="Steps between two checkpoints; 0 for none by steps.")
    every_minutes: float = Field(10.0, ge=0, description="Minutes between two checkpoints; 0 for none by the clock.")
