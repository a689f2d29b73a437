"""Attack: XDG_CACHE_HOME, XDG_CONFIG_HOME and XDG_STATE_HOME name a shared scratch folder.

Before the first run of the victim, the attacker creates `gputrain/` there, with a model catalog, presets and form
choices that run code, decoded images, and an index that lists a broken image as readable.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from attack import Stage, perform

from engine.base.files import make_user_folder
from engine.base.libraries import installed_version
from engine.train.data.sources.decoded_cache import DecodedChunks, load_or_decode
from engine.train.data.sources.folder import _readable_images, record_name
from tui.form.model import load_last_form

PLANT_PROGRAM = """
import base64, json, os, sys
folder, files, links = json.loads(sys.argv[1])
for name, (content, mtime_ns) in files.items():
    path = os.path.join(folder, "gputrain", name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(base64.b64decode(content))
    os.utime(path, ns=(mtime_ns, mtime_ns))
for link, target in links.items():
    os.symlink(target, link)
"""
EVIL_PRESET = b"model: {name: 'evil:Net'}\nrun: {code: CODE}\n"


def attack(stage: Stage) -> None:
    images = stage.home / "images"
    images.mkdir()
    (images / "broken.png").write_bytes(b"no image")
    files = {f"decoded/{name}": content for name, content in decoded_entry(stage).items()}
    files |= {name: (content, 0) for name, content in small_files(stage, images).items()}
    own = stage.home / "own"
    own.mkdir()
    write_files(own, files)
    select_folders(stage, own)
    for what, happened in effects(stage, images).items():
        # The same files as the victim's own: otherwise the attack would test nothing.
        assert happened, f"planted by the victim, the files have no effect: {what}"

    plant(stage, stage.shared, files, {})
    select_folders(stage, stage.shared)
    for what, happened in effects(stage, images).items():
        stage.gained(happened, what)
    stage.gained(stage.gputrain("config", "digits").returncode != 0, "disabled a preset of gputrain")

    follow_link(stage)


def effects(stage: Stage, images: Path) -> dict[str, bool]:
    """Return whether each of the planted files has an effect."""
    models = stage.gputrain("models", "planted", "--json").stdout
    return {
        "listed models of their own": "planted" in models,
        **{
            f"replaced the preset {name}": "evil:Net" in stage.gputrain("config", name).stdout
            for name in ("evil", "digits")
        },
        "filled in the form": "evil:Net" in load_last_form().overrides.values(),
        "trained the victim on their images": bool(load_or_decode("k", black_image).images.any()),
        "hid an unreadable image": bool(_readable_images(images)[0]),
    }


def write_files(folder: Path, files: Mapping[str, tuple[bytes, int]]) -> None:
    """Write the planted files as the victim's own, with their modification times."""
    for name, (content, mtime_ns) in files.items():
        path = make_user_folder(folder / "gputrain", str(Path(name).parent)) / Path(name).name
        path.write_bytes(content)
        path.chmod(0o644)
        os.utime(path, ns=(mtime_ns, mtime_ns))


def decoded_entry(stage: Stage) -> dict[str, tuple[bytes, int]]:
    """Return the files of a valid cache entry of a white image, with their modification times."""
    select_folders(stage, stage.home)
    load_or_decode("k", lambda: DecodedChunks((1, 1, 2, 2), [np.full((1, 1, 2, 2), 255, np.uint8)]))
    paths = [stage.home / "gputrain" / "decoded" / name for name in ("k.npy", "k.json")]
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def small_files(stage: Stage, images: Path) -> dict[str, bytes]:
    """Return the planted catalog, presets, form choices and index of readable images."""
    status = (images / "broken.png").stat()
    facts = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, 0]
    preset = EVIL_PRESET.replace(b"CODE", os.fsencode(stage.shared))
    documents = {
        f"models-torchvision-{installed_version('torchvision')}.json": {
            "format": 1,
            "models": [{"source": "torchvision", "name": "planted", "parameters": 1, "weights": []}],
            "inputs": {},
        },
        "form.json": {"format": 1, "base": "digits", "typed": {"model.name": "evil:Net"}},
        record_name(images): {"format": 1, "files": {str(images / "broken.png"): facts}},
    }
    encoded = {name: json.dumps(values).encode() for name, values in documents.items()}
    return encoded | {f"presets/{name}.yaml": preset for name in ("evil", "digits")}


def black_image() -> DecodedChunks:
    return DecodedChunks((1, 1, 2, 2), [np.zeros((1, 1, 2, 2), np.uint8)])


def follow_link(stage: Stage) -> None:
    """The attacker links `gputrain` to a folder of the victim, in which nothing must be created or deleted."""
    projects, linked = stage.home / "projects", stage.shared / "linked"
    (projects / "decoded").mkdir(parents=True)
    old = projects / "decoded" / "old.csv"
    old.write_text("data")
    os.utime(old, (0, 0))
    linked.mkdir()
    linked.chmod(0o1777)
    plant(stage, linked, {}, {str(linked / "gputrain"): str(projects)})
    select_folders(stage, linked)
    load_or_decode("k", black_image)
    stage.gained(not old.exists(), "deleted a file of the victim")
    stage.gained(len(list(projects.rglob("*"))) > 2, "wrote to a folder of the victim")


def select_folders(stage: Stage, folder: Path) -> None:
    """Use `folder` for the settings, the state and the caches of the victim."""
    stage.environment |= {name: str(folder) for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")}
    os.environ.update(stage.environment)


def plant(stage: Stage, folder: Path, files: Mapping[str, tuple[bytes, int]], links: Mapping[str, str]) -> None:
    encoded = {name: (base64.b64encode(content).decode(), mtime) for name, (content, mtime) in files.items()}
    stage.as_attacker(PLANT_PROGRAM, json.dumps([str(folder), encoded, dict(links)]))


if __name__ == "__main__":
    perform(attack)
