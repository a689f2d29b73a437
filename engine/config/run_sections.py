"""Config sections `run`, `device` and `checkpoint`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.config.section import GpuSelection, PackageNames, RunName, Section, Text


class RunConfig(Section):
    """Section `run`: name, length and lifecycle of the run."""

    name: RunName | None = Field(
        None, description="Name of the run and its folder. Default: the config's name and a number, such as digits-3."
    )
    epochs: int = Field(10, ge=1, le=10**9, description="Number of training epochs.")
    seed: int = Field(
        0,
        ge=0,
        lt=2**32,
        description="Random seed. It determines initial weights, validation split, shuffling and augmentation.",
    )
    resume: bool = Field(
        False,
        description="Continue run.name if it exists, else start it. A training continues from its last checkpoint, a "
        "command from its start.",
    )
    code: Text | None = Field(
        None,
        title="code folder",
        description="Folder to import user code (module:name) from. Its .py files must be ones that only you can "
        "change. Default: the working directory.",
    )
    code_packages: PackageNames = Field(
        (),
        description="Installed packages that user code (module:name) may name. Example: [torchvision]. Only the "
        "command line and the user's settings.yaml can set it.",
    )
    snapshot: bool = Field(
        False,
        description="Run from a copy of the code. The copy is made with the run: later changes have no effect on it, "
        "even while it waits. Needs a git repository; what it ignores, such as data/, is linked.",
    )
    monitor: Text = Field(
        "auto",
        description="Metric of the validation that selects the best epoch: its checkpoint, and what run.early_stop and "
        "schedule plateau follow. accuracy, loss, top5, macro_f1, macro_precision, macro_recall, balanced_accuracy or "
        "one of eval.metrics; with task multilabel loss, mAP, macro_f1 or micro_f1; with regression loss, mae, rmse "
        "or r2. auto is accuracy, mAP or mae, and loss for schedule plateau.",
    )
    monitor_mode: Literal["auto", "max", "min"] = Field(
        "auto",
        description="Whether the maximum or the minimum of run.monitor is best, if it is one of your own metrics. auto "
        "takes it from the name, such as min for rmse, or from `gputrain runs better`.",
    )
    early_stop: int = Field(
        0,
        ge=0,
        le=10**9,
        title="early stop",
        description="Finish after this many epochs without improvement of run.monitor; 0 disables. The LR schedule "
        "does not change.",
    )
    early_stop_min_delta: float = Field(
        0.0,
        ge=0,
        title="least gain",
        description="Least gain of run.monitor that counts as an improvement for run.early_stop. An accuracy is from 0 "
        "to 1.",
    )
    log_every: int = Field(10, ge=1, description="Log loss, learning rate and throughput every this many steps.")
    watchdog: float = Field(
        600.0,
        ge=0,
        description="Fail if no rank makes progress for this many seconds; 0 disables. The message names the rank "
        "that hangs. Set it higher than the longest step or checkpoint save takes.",
    )
    max_restarts: int = Field(
        0,
        ge=0,
        description="Maximum number of restarts after a failure. A training restarts from the last checkpoint after "
        "a rank fails; a command restarts if it fails. Under torchrun, its own --max-restarts applies "
        "instead.",
    )
    requeue: bool = Field(
        False,
        title="Slurm requeue",
        description="Requeue the Slurm job when SIGUSR1 stops the run. Implies run.resume. Submit the job with "
        "sbatch --signal=B:USR1@60 and exec gputrain, or --signal=USR1@60 and srun gputrain.",
    )


class DeviceConfig(Section):
    """Section `device`: GPUs, ranks and how they communicate."""

    gpus: GpuSelection = Field(
        "auto",
        min_length=1,
        title="GPUs",
        description="GPUs: free:2, 0,1, cpu, auto for all free. auto uses the CPU if no GPU is free; "
        "all uses every GPU; free:N uses N free GPUs. A list has indices (0,2) or UUIDs.",
    )
    wait: bool = Field(
        False,
        title="wait for GPUs",
        description="Wait in the queue for free GPUs or the CPU. Runs that wait for the same GPUs start in order of "
        "arrival. Runs that wait for the CPU use it one after the other; a run without device.wait does "
        "not count.",
    )
    ranks: int = Field(
        1, ge=1, title="CPU ranks", description="Number of ranks on the CPU. On GPUs, each GPU has one rank."
    )
    threads: int = Field(
        0,
        ge=0,
        le=4096,
        title="CPU threads",
        description="CPU threads per rank; 0 divides the cores among the ranks. Another number may change the last "
        "bits of results on the CPU.",
    )
    launcher: Literal["auto", "spawn", "env", "slurm"] = Field(
        "auto",
        description="What starts the ranks. spawn is gputrain, env is torchrun, slurm is srun; auto detects it from "
        "the environment.",
    )
    start_method: Literal["auto", "spawn", "fork"] = Field(
        "auto",
        description="How gputrain starts its ranks: spawn, fork or auto. spawn is torch.multiprocessing.spawn; fork "
        "is faster. auto forks unless the process that starts the ranks has threads or uses a GPU.",
    )
    deterministic: bool = Field(
        False,
        description="Use only deterministic algorithms. Results are reproducible bit for bit, but training is slower.",
    )
    cudnn_benchmark: bool = Field(
        True, title="cuDNN benchmark", description="Let cuDNN benchmark its algorithms and use the fastest."
    )
    timeout: float = Field(
        600.0,
        gt=0,
        description="Timeout in seconds for ranks to join, and for collectives. Collectives time out at least 60 s "
        "after run.watchdog, which names the rank that hangs.",
    )
    parallel: Literal["ddp", "dp"] = Field(
        "ddp",
        title="parallelism",
        description="One process per GPU (ddp), or one process for all GPUs (dp). dp is torch's DataParallel; it is "
        "slower and serves for comparison.",
    )
    backend: Literal["auto", "nccl", "nccl-legacy", "nccl2", "gloo"] = Field(
        "auto",
        description="Process group backend. auto uses NCCL for several ranks on GPUs, else gloo. torch 2.15 has two "
        "implementations of NCCL: auto takes nccl-legacy, which overlaps DDP's all-reduce with the backward pass; nccl "
        "is torch's own choice.",
    )
    init_method: Literal["auto", "env://"] = Field(
        "auto",
        title="rendezvous",
        description="Rendezvous: auto or env://. env:// takes the address in MASTER_ADDR and MASTER_PORT, as under "
        "torchrun and srun, also for ranks that gputrain starts.",
    )
    bucket_view: bool = Field(
        True,
        title="bucket views",
        description="Make gradients views of DDP's communication buckets. Saves memory and a copy "
        "(gradient_as_bucket_view).",
    )
    bucket_cap_mb: float | None = Field(
        None,
        gt=0,
        le=4096,
        title="bucket size",
        description="Size of DDP's communication buckets in MiB. Unset is DDP's default of 25. Larger buckets make "
        "fewer all-reduces, smaller ones start earlier.",
    )
    compress: Literal["off", "bf16"] = Field(
        "off",
        title="grad compression",
        description="Data type in which ranks all-reduce gradients. off is that of the gradients; bf16 halves their "
        "size and rounds them (DDP's bf16_compress_hook).",
    )
    static_graph: bool = Field(
        False,
        title="static DDP graph",
        description="Tell DDP that every step uses the same parameters in the same order. Lowers DDP's overhead.",
    )
    empty_cache: bool = Field(False, description="Release cached GPU memory to the driver after each evaluation.")


class CheckpointConfig(Section):
    """Section `checkpoint`: when checkpoints are saved and how many are kept."""

    keep: int = Field(
        3, ge=1, title="checkpoints kept", description="Number of recent checkpoints to keep, in addition to the best."
    )
    every_epochs: int = Field(
        1, ge=1, description="Epochs between checkpoints. A new best epoch and the last epoch are always saved."
    )
    every_steps: int = Field(0, ge=0, le=10**9, description="Steps between checkpoints; 0 disables.")
    every_minutes: float = Field(10.0, ge=0, description="Minutes between checkpoints; 0 disables.")
