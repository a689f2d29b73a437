"""Training on two GPUs over NCCL: the same as on two CPU ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.gpu.fake_cuda import DdpRun, Rehearsal, epochs_of, losses_of, nccl_backend, run_started
from support.gpu.fake_gpu_host import gpu_uuid, parse_gpus_json

CPU = ("--gpus", "cpu")
COLOR = ("--dataset", "fake", "data.fake_train=96", "data.fake_val=21", "data.image_size=12", "--epochs", "2")
COLOR += ("--lr", "0.003", "run.log_every=1")
BATCH, WHOLE_BATCH = ("--batch-size", "16"), ("--batch-size", "32")


def assert_equal_training(run: Path, other: Path) -> None:
    assert losses_of(run) == pytest.approx(losses_of(other), rel=1e-3)
    accuracies = [
        [(epoch["val_accuracy"], epoch["skipped_steps"]) for epoch in epochs_of(each)] for each in (run, other)
    ]
    assert accuracies[0] == accuracies[1]


@pytest.mark.rehearsal
def test_ddp_over_nccl_equals_cpu_ranks(ddp_run: DdpRun) -> None:
    on_cpu = ddp_run.gputrain.run("cpu", *ddp_run.arguments, "--ranks", "2", *CPU)
    started = run_started(ddp_run.path)
    assert (started["backend"], started["devices"]) == (nccl_backend(), [gpu_uuid(0), gpu_uuid(1)])
    assert_equal_training(ddp_run.path, on_cpu)


@pytest.mark.rehearsal
def test_spawned_ranks_train_like_forked_ones(ddp_run: DdpRun) -> None:
    options = (*ddp_run.arguments, "--gpus", "free:2", "device.start_method=spawn")
    spawned = ddp_run.gputrain.run("spawned", *options)
    assert [run_started(run)["start_method"] for run in (ddp_run.path, spawned)] == ["fork", "spawn"]
    assert_equal_training(spawned, ddp_run.path)


@pytest.mark.rehearsal
def test_only_rank_0_has_context_on_gpu_0(ddp_run: DdpRun) -> None:
    contexts = [
        [line.partition(" by ")[0] for line in lines if line.startswith("context")]
        for lines in ddp_run.cuda_log.values()
    ]
    assert sorted(contexts) == [["context on device 0"], ["context on device 1"]]


@pytest.mark.rehearsal
def test_finished_run_has_freed_its_gpus(ddp_run: DdpRun) -> None:
    gpus = parse_gpus_json(ddp_run.gputrain("gpus", "--json").stdout)
    assert len(gpus) == 2
    assert [gpu["runs"] for gpu in gpus] == [[], []]


@pytest.mark.rehearsal
def test_dp_on_two_gpus_equals_one_cpu_rank(rehearsal: Rehearsal) -> None:
    recipe = (*COLOR, "--model", "linear")
    on_gpus = rehearsal.run("dp", *recipe, *BATCH, "--gpus", "free:2", "device.parallel=dp")
    assert (run_started(on_gpus)["world_size"], run_started(on_gpus)["global_batch"]) == (1, 32)
    assert_equal_training(on_gpus, rehearsal.run("cpu", *recipe, *WHOLE_BATCH, *CPU))


@pytest.mark.rehearsal
@pytest.mark.parametrize(
    "recipe",
    [
        ("optim.accumulate=3", "optim.clip_norm=0.5", "model.ema=0.9", "augment.mixup=0.2"),
        ("--optimizer", "adamw", "optim.clip_value=0.01", "augment.cutmix=0.5", "loss.label_smoothing=0.1"),
        ("data.pipeline=stream", "--workers", "1", "augment.crop_padding=2", "augment.flip=true"),
        ("data.pipeline=fixed", "device.bucket_view=false", "device.static_graph=true"),
        ("--amp", "bf16", "checkpoint.every_steps=2"),
    ],
)
def test_recipe_over_nccl_equals_cpu_ranks(rehearsal: Rehearsal, recipe: tuple[str, ...]) -> None:
    recipe = (*COLOR, *BATCH, *recipe)
    on_gpus = rehearsal.run("gpus", *recipe, "--gpus", "free:2")
    assert_equal_training(on_gpus, rehearsal.run("cpu", *recipe, "--ranks", "2", *CPU))


@pytest.mark.rehearsal
@pytest.mark.parametrize("pipeline", ["memory", "stream"])
def test_size_schedule_on_two_gpus_equals_cpu_ranks(rehearsal: Rehearsal, pipeline: str) -> None:
    model = ("--model", "resnet18-small", "model.options={width: 8}", "data.size_schedule=[8@1,16@2]")
    optimizer = ("--optimizer", "muon", "--lr", "0.001")
    recipe = (*COLOR, *BATCH, *model, *optimizer, f"data.pipeline={pipeline}")
    on_gpus = rehearsal.run("gpus", *recipe, "--gpus", "free:2")
    assert_equal_training(on_gpus, rehearsal.run("cpu", *recipe, "--ranks", "2", *CPU))
    small, large = epochs_of(on_gpus)
    assert (small["train_size"], large["train_size"]) == (8, 16)
    assert 3 < large["flops"] / small["flops"] < 5


@pytest.mark.rehearsal
@pytest.mark.parametrize("amp", ["fp16", "O1", "O2", "O3"])
def test_half_precision_over_nccl_trains(rehearsal: Rehearsal, amp: str) -> None:
    run = rehearsal.run("gpus", "digits", "--epochs", "3", "--amp", amp, "--gpus", "free:2")
    assert epochs_of(run)[-1]["val_accuracy"] > 0.9


@pytest.mark.rehearsal
def test_nan_on_one_gpu_skips_step_on_both(rehearsal: Rehearsal) -> None:
    rehearsal.inject_fault("nan", 1, 3)
    recipe = (*COLOR, *BATCH, "optim.nonfinite=skip")
    on_gpus = rehearsal.run("gpus", *recipe, "--gpus", "free:2")
    assert epochs_of(on_gpus)[-1]["skipped_steps"] == 1
    assert_equal_training(on_gpus, rehearsal.run("cpu", *recipe, "--ranks", "2", *CPU))


@pytest.mark.rehearsal
def test_sync_batch_norm_on_two_gpus_equals_one_rank_with_whole_batch(rehearsal: Rehearsal) -> None:
    on_gpus = rehearsal.run("gpus", *COLOR, *BATCH, "--gpus", "free:2", "model.sync_bn=true")
    assert_equal_training(on_gpus, rehearsal.run("cpu", *COLOR, *WHOLE_BATCH, *CPU))


@pytest.mark.rehearsal
@pytest.mark.parametrize("pipeline", ["memory", "stream", "fixed"])
def test_grayscale_pipeline_on_two_gpus_equals_cpu_ranks(rehearsal: Rehearsal, pipeline: str) -> None:
    """A grayscale image folder whose images the model receives with three channels."""
    from PIL import Image

    for label in ("a", "b"):
        for number in range(24):
            path = rehearsal.folder / "images" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((16, 16), 40).point(lambda value, n=number: value // 2 + n).save(path)
    recipe = ("--dataset", "folder", "--data-path", "images", "data.image_size=16", "--batch-size", "8")
    recipe += ("--epochs", "1", "data.channels=3", f"data.pipeline={pipeline}", "--workers", "1", "run.log_every=1")
    on_gpus = rehearsal.run("gpus", *recipe, "--gpus", "free:2")
    assert_equal_training(on_gpus, rehearsal.run("cpu", *recipe, "--ranks", "2", *CPU))
