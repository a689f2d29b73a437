"""Attack: make the victim's commands run code that a checkpoint, a config or a module of the attacker names.

The marker file tells that code ran. Each command runs in a fork of this process, which has imported torch once.
"""

from __future__ import annotations

import os
import sys
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from attack import ATTACKER_UID, Stage, perform
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.config.loader import resolve_config
from engine.config.schema import as_dict
from engine.config.yaml_io import to_yaml
from support.runs.trained_run import saved_run
from tui.cli.main import app

NETS = """
from torch import nn
def build(in_chans, num_classes, img_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_chans * img_size**2, num_classes))
def images(part): ...
"""
PLANT = """
import pathlib, sys
marker, nets = sys.argv[1:]
for name in ("evil", "nets"):
    pathlib.Path(name + ".py").write_text(f"open({marker!r}, 'w').close()" + nets)
options = "{cmd: 'touch " + marker + "'}"
configs = {
    "module": f"model: {{name: 'evil:build'}}\\nrun: {{code: {pathlib.Path.cwd()}}}",
    "shell": f"model: {{name: 'subprocess:getoutput', options: {options}}}",
    "base": "base: module.yaml",
}
for name, text in configs.items():
    pathlib.Path(name + ".yaml").write_text(text)
"""
PLANT_PYC = """
import marshal, pathlib, sys
code = compile(f"open({sys.argv[1]!r}, 'w').close()", "nets.py", "exec")
# A pyc file with flags 0b01 is not compared with its source (PEP 552).
path = pathlib.Path(sys.argv[2])
path.unlink(missing_ok=True)
path.write_bytes(bytes.fromhex(sys.argv[3]) + (1).to_bytes(4, "little") + bytes(8) + marshal.dumps(code))
"""
# No config may name a module of the standard library.
NEVER_IMPORTED = ("a function of the standard library",)


class Victim:
    """Runs gputrain in `home`, and finds out whether the attacker's code ran."""

    def __init__(self, stage: Stage, marker: Path) -> None:
        self._stage, self._marker = stage, marker

    def tries(self, what: str, *arguments: str | Path) -> None:
        self._stage.gained(self.runs_code(*arguments), f"code ran: {what}, {arguments[0]}")

    def runs_code(self, *arguments: str | Path) -> bool:
        """Run a command, and return whether it ran code that creates the marker."""
        process = os.fork()
        if process == 0:
            self._run([str(argument) for argument in arguments])
        os.waitpid(process, 0)
        is_marked = self._marker.exists()
        self._marker.unlink(missing_ok=True)
        return is_marked

    def _run(self, arguments: list[str]) -> None:
        os.chdir(self._stage.home)
        os.environ.update(self._stage.environment)
        output = os.open(self._stage.home / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            app(arguments)
        finally:
            os._exit(1)


def attack(stage: Stage) -> None:
    marker, home = stage.shared / "marker", stage.home
    stage.as_attacker(PLANT, marker, NETS)
    victim = Victim(stage, marker)

    # The victim's own run, whose code lies in the victim's home.
    code = home / "code"
    code.mkdir()
    (code / "nets.py").write_text(NETS)
    own = saved_run(
        stage.shared / "runs" / "own",
        model={"name": "nets:build"}, run={"code": str(code)}, data={"dataset": "fake", "image_size": 8},
    )  # fmt: skip
    config = resolve_config(None, ["model.name=nets:build", f"run.code={code}", "data.dataset=fake"]).config
    own.config.write_text(to_yaml(as_dict(config)))
    # The forks must import it again.
    del sys.modules["nets"]
    sys.path.remove(str(code))

    image = home / "image.png"
    Image.new("RGB", (8, 8)).save(image)
    control = home / "control"
    control.mkdir()
    check_control(stage, control, image)
    for what, values in evil_checkpoints(stage.shared, marker).items():
        path = saved_checkpoint(stage.shared / what.replace(" ", "-"), values)
        for file in (path.parents[1], *path.parents[1].rglob("*")):
            os.chown(file, ATTACKER_UID, ATTACKER_UID)
        victim.tries(what, "predict", "own", image, "--checkpoint", path, "--gpus", "cpu")
        victim.tries(what, "evaluate", "own", "--checkpoint", path, "--gpus", "cpu")
        victim.tries(what, "export", "own", "--checkpoint", path, "--output", home / "exported")

    cpu = ("--gpus", "cpu")
    mine = home / "mine.yaml"
    mine.write_text(f"base: {stage.shared}/base.yaml\n")
    for name in ("module", "shell"):
        file = stage.shared / f"{name}.yaml"
        victim.tries(f"config {name}", "run", "--dry-run", file, *cpu)
        victim.tries(f"config {name}", "models", "show", file)
    victim.tries("base file", "run", "--dry-run", mine, *cpu)

    # The attacker can write into a folder beside the victim's source.
    compiled = code / "__pycache__"
    compiled.mkdir(exist_ok=True)
    home.chmod(0o711)
    compiled.chmod(0o777)
    stage.as_attacker(PLANT_PYC, marker, compiled / f"nets.{sys.implementation.cache_tag}.pyc", MAGIC_NUMBER.hex())
    victim.tries("compiled code", "run", "--dry-run", "model.name=nets:build", f"run.code={code}", *cpu)
    victim.tries("compiled code", "predict", "own", image, "--gpus", "cpu")


def check_control(stage: Stage, folder: Path, image: Path) -> None:
    """Raise AssertionError unless the same files run their code if the victim owns them, and trusts the checkpoints."""
    marker = folder / "marker"
    stage.as_victim(PLANT, marker, NETS, folder=folder)
    run = saved_run(stage.shared / "runs" / "control")
    config = resolve_config(None, ["model.name=nets:build", f"run.code={folder}", "data.dataset=fake"]).config
    run.config.write_text(to_yaml(as_dict(config)))
    victim, cpu = Victim(stage, marker), ("--gpus", "cpu")
    for what, values in evil_checkpoints(folder, marker).items():
        path = saved_checkpoint(folder / what.replace(" ", "-"), values)
        command = "predict" if "model" in values else "evaluate"
        files = [image] if command == "predict" else []
        ran = victim.runs_code(command, "control", *files, "--checkpoint", path, "--gpus", "cpu", "--trust-code")
        assert ran == (what not in NEVER_IMPORTED), f"{what}: whether its code ran: {ran}"
    for name in ("module", "base"):
        assert victim.runs_code("models", "show", folder / f"{name}.yaml"), name
        assert victim.runs_code("run", "--dry-run", folder / f"{name}.yaml", *cpu), name
    (folder / "nets.py").write_text(NETS)
    compiled = folder / "__pycache__" / f"nets.{sys.implementation.cache_tag}.pyc"
    compiled.parent.mkdir(exist_ok=True)
    stage.as_victim(PLANT_PYC, marker, compiled, MAGIC_NUMBER.hex())
    assert victim.runs_code("run", "--dry-run", "model.name=nets:build", f"run.code={folder}", *cpu), "compiled code"


def evil_checkpoints(folder: Path, marker: Path) -> dict[str, dict[str, dict[str, object]]]:
    """Return sections of the config of each checkpoint, which name code to run; `folder` has its modules."""
    run: dict[str, object] = {"code": str(folder)}
    return {
        "a function of the standard library": {
            "model": {"name": "subprocess:getoutput", "options": {"cmd": f"touch {marker}"}}
        },
        "a module of the attacker": {"model": {"name": "evil:build"}, "run": run},
        "a name that the victim's run uses": {"model": {"name": "nets:build"}, "run": run},
        "a dataset of the attacker": {"data": {"dataset": "evil:images"}, "run": run},
    }


def saved_checkpoint(folder: Path, values: dict[str, dict[str, object]]) -> Path:
    """Return the checkpoint of a run in `folder`, whose config has these values."""
    sizes = ["data.dataset=fake", "data.image_size=8", "data.num_classes=5", "model.name=linear"]
    config = as_dict(resolve_config(None, sizes).config)
    values = {section: config[section] | values.get(section, {}) for section in config}
    return saved_run(folder, {"config": values}).checkpoints / "last.pt"


if __name__ == "__main__":
    perform(attack)
