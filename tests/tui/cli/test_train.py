"""Which run `gputrain run` starts: the name and its number."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.loader import resolve_config
from engine.config.schema import Config, as_stored
from engine.config.yaml_io import to_yaml
from engine.runs.ownership import claim_run
from support.runs.factories import make_run_folder
from tui.cli.train import StartOptions, build_request


@pytest.mark.parametrize(
    ("stored", "folder", "overrides", "started"),
    [
        ("a-7", "a-7", [], "a-1"),
        ("a", "a", [], "a-1"),
        ("a", "renamed", [], "a"),
        ("a", "a", ["run.name=b"], "b"),
        ("a", "a", ["run.resume=true"], "a"),
        ("a", "a", ["run.requeue=true"], "a"),
    ],
)
def test_stored_config_repeats_its_run_under_next_free_name(
    tmp_path: Path, stored: str, folder: str, overrides: list[str], started: str
) -> None:
    run = make_run_folder(tmp_path, folder)
    run.config.write_text(to_yaml(as_stored(Config.model_validate({"run": {"name": stored}}))))
    request = build_request(
        lambda: resolve_config(str(run.config), overrides), StartOptions(runs_dir=str(tmp_path)), base="config"
    )
    config = request.config.run
    claimed = claim_run(tmp_path, config.name, request.default_name, resume=config.resume or config.requeue)
    assert claimed.folder.name == started
    claimed.ownership.release()


def test_config_of_user_keeps_its_name_which_is_in_use(tmp_path: Path) -> None:
    make_run_folder(tmp_path, "a")
    file = tmp_path / "config.yaml"
    file.write_text("run: {name: a}")
    start = StartOptions(runs_dir=str(tmp_path))
    assert build_request(lambda: resolve_config(str(file)), start, base="config").config.run.name == "a"
