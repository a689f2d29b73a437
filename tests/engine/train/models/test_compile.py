"""A compiled model returns the outputs of the eager one and keeps its parameter names."""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

from engine.config.loader import resolve_config
from engine.runs.events import Event, WarningEvent
from engine.train.loop.checkpoint import load_checkpoint
from engine.train.loop.train import run_training
from engine.train.models.compile import COMPILE_FOLDER_VARIABLE, compile_in_place
from support.messages import raises_problem
from support.runs.in_process import single_rank_trainer

# Twelve whole batches and one of half the size.
SMALL = ("model.name=linear", "data.dataset=fake", "data.fake_train=200", "data.fake_val=24", "data.batch_size=16")
SMALL += ("data.image_size=4", "run.epochs=1", "data.drop_last=false")
needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("is_writable", [False, True])
def test_compiled_code_is_kept_where_other_users_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_writable: bool
) -> None:
    # Set first, so that it is removed after the test.
    monkeypatch.setenv(COMPILE_FOLDER_VARIABLE, "")
    monkeypatch.delenv(COMPILE_FOLDER_VARIABLE)
    monkeypatch.setattr(inductor_config, "cpp_cache_precompile_headers", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (folder := tmp_path / "cache" / "gputrain" / "compiled").mkdir(parents=True)
    folder.chmod(0o777 if is_writable else 0o700)
    compile_in_place(nn.Linear(1, 1), resolve_config(None, ["model.compile=true"]).config)
    used = Path(os.environ[COMPILE_FOLDER_VARIABLE])
    assert (used == folder, used.parent == tmp_path) == (not is_writable, is_writable)
    assert not inductor_config.cpp_cache_precompile_headers, "torch keeps the header in its default folder"
    assert used.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "backend",
    ["eager", pytest.param("inductor", marks=[needs_a_compiler, pytest.mark.nightly])],  # the compiler takes 15 s
)
def test_compiled_model_trains_same_weights_under_same_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    torch.compiler.reset()
    if backend == "eager":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    results = []
    for options in ((), ("model.compile=true", "model.ema=0.9")):
        folder, events = tmp_path / str(len(results)), list[Event]()
        folder.mkdir()
        with single_rank_trainer(*SMALL, *options, folder=folder, events=events) as trainer:
            warnings = [event.message for event in events if isinstance(event, WarningEvent)]
            run_training(trainer, [])
            skipped = trainer.log.skipped.total + sum(trainer.log.unreported()[1])
            results.append((skipped, load_checkpoint(folder / "checkpoints" / "last.pt"), warnings))
    (_, plain, no_warnings), (_, compiled, warnings) = results
    assert (no_warnings, len(warnings)) == ([], 1)
    assert " linear (model.compile_mode default)" in warnings[0]
    assert list(plain["model"]) == list(compiled["model"]) == list(compiled["ema"])
    assert all(torch.allclose(plain["model"][key], value, atol=1e-5) for key, value in compiled["model"].items())
    with single_rank_trainer(*SMALL, checkpoint=tmp_path / "1" / "checkpoints" / "last.pt") as trainer:
        resumed = trainer.model.network.state_dict()
        assert all(torch.equal(value, compiled["model"][key]) for key, value in resumed.items())


def test_compile_failure_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor import config

    torch.compiler.reset()
    monkeypatch.setattr(config.cpp, "cxx", (None, "no-such-compiler"))
    monkeypatch.setattr(config, "force_disable_caches", True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with (
        raises_problem("library-failed", "model.compile", " linear ", "(InvalidCxxComp"),
        single_rank_trainer(*SMALL, "model.compile=true"),
    ):
        pass


@pytest.mark.parametrize(
    ("recipe", "location", "value"),
    [
        (("device.parallel=dp",), "model.compile", "device.parallel=dp"),
        (("model.compile_mode=reduce-overhead", "optim.accumulate=2"), "model.compile_mode", "reduce-overhead "),
    ],
)
def test_compile_rejects_incompatible_options(recipe: tuple[str, ...], location: str, value: str) -> None:
    with raises_problem("conflict", location, value):
        resolve_config("digits", ("model.compile=true", *recipe))
