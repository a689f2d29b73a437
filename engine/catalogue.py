"""What only torchvision can tell, told without importing it: a short-lived process writes it once for each installed
version into the user's cache."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

from engine.files import cache_folder, read_json, write_json
from engine.problems import UsageError, nearest

BUILTIN_MODELS = ("cnn", "linear", "resnet18-small")
_PROGRAM = "import json; from engine.models import torchvision_names; print(json.dumps(torchvision_names()))"


def check_model_name(name: str) -> None:
    """Raises UsageError where no model has this name."""
    if name in BUILTIN_MODELS:
        return
    known = [*BUILTIN_MODELS, *torchvision_models()]
    if name not in known:
        ours = ", ".join(BUILTIN_MODELS)
        hint = nearest(name, known)
        raise UsageError.one("model.name", f"there is no model {name!r}{hint}; there are {ours} and torchvision's")


def torchvision_models() -> list[str]:
    """Names of torchvision's classification models. Raises UsageError where torchvision does not work."""
    path = cache_folder() / f"models-torchvision-{version('torchvision')}.json"
    stored = read_json(path)
    if stored is not None and isinstance(stored.get("models"), list):
        return [str(name) for name in stored["models"]]
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise UsageError.one("model.name", f"torchvision's models cannot be listed: {last[0]}")
    names: list[str] = json.loads(done.stdout)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"models": names})
    except OSError:
        # Without a cache the next run asks again.
        return names
    return names
