"""User code: import, checks before the start, and one-line error messages."""

from __future__ import annotations

import json
import py_compile
import signal
import sys
from pathlib import Path

import pytest
from torch import nn

from engine.config.schema import Config
from engine.config.settings import settings_file
from engine.config.user_code import check_user_code, load_user_code
from engine.models.factory import build_model
from engine.utils.errors import UsageError

NETS = """
import torch
from torch import nn

net = nn.Linear(1, 1)

def build(in_chans, num_classes, img_size, *, hidden, dropout=0.0):
    flat = in_chans * img_size * img_size
    return nn.Sequential(nn.Flatten(), nn.Linear(flat, hidden), nn.Dropout(dropout), nn.Linear(hidden, num_classes))

class Net(nn.Sequential):
    def __init__(self, channels, classes):
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

def fails(classes):
    raise KeyError("no such layer")

def gives_a_dict(classes):
    return {}
"""

BORROWS = """
import functools
import os
import subprocess
from os import system
from subprocess import Popen, getoutput
from torch.nn import Linear

run_code = eval

def own(): ...

class Own:
    def method(self): ...
    def __call__(self): ...

cached = functools.cache(own)
bound = functools.partial(system, "true")
instance = Own()
"""


@pytest.fixture(scope="module")
def user_code_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with user code."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "owncode").mkdir()
    files = {
        "owncode/__init__.py": "",
        "owncode/nets.py": NETS,
        "owncode/light.py": "print('a word at import')\ntable = {}\ndef build(classes): ...\n",
        "owncode/divides.py": "ratio = 1\nratio / 0\n",
        "owncode/lacks.py": "import surely_not_installed\n",
        "owncode/unfinished.py": "def build(:\n",
        "owncode/exits.py": "import sys\nsys.exit(4)\n",
        "owncode/dies.py": "import os\nos._exit(4)\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def config(code: Path, name: str, **options: object) -> Config:
    return Config.model_validate({"run": {"code": str(code)}, "model": {"name": name, "options": options}})


def refusal(code: Path, name: str, **options: object) -> str:
    with pytest.raises(UsageError) as caught:
        build_model(config(code, name, **options), 1, 5, 8)
    return str(caught.value)


def test_user_model_receives_input_shape_and_options(user_code_folder: Path) -> None:
    model = build_model(config(user_code_folder, "owncode.nets:build", hidden=7, dropout=0.5), 3, 5, 8)
    assert isinstance(model, nn.Sequential)
    assert [tuple(weights.shape) for weights in model.parameters()] == [(7, 192), (7,), (5, 7), (5,)]
    assert model[2].p == 0.5


def test_user_model_may_be_class(user_code_folder: Path) -> None:
    model = build_model(config(user_code_folder, "owncode.nets:Net"), 3, 5, 8)
    assert [tuple(weights.shape) for weights in model.parameters()] == [(5, 3), (5,)]


def test_user_model_reports_all_invalid_options_together(user_code_folder: Path) -> None:
    message = refusal(user_code_folder, "owncode.nets:build", hiden=7, num_classes=3)
    assert "owncode.nets:build has no option 'hiden'; did you mean hidden?" in message
    assert "owncode.nets:build requires hidden; set it here" in message
    assert "num_classes is derived from the data" in message


def test_user_model_error_names_line(user_code_folder: Path) -> None:
    line = NETS.splitlines().index('    raise KeyError("no such layer")') + 1
    message = refusal(user_code_folder, "owncode.nets:fails")
    assert message == (
        f"model.name: owncode.nets:fails failed: KeyError: 'no such layer' ({user_code_folder}/owncode/nets.py, line "
        f"{line})"
    )


def test_user_model_must_return_module(user_code_folder: Path) -> None:
    assert "must return a torch.nn.Module, not dict" in refusal(user_code_folder, "owncode.nets:gives_a_dict")
    assert "is a model instance; use a function or class that builds one" in refusal(
        user_code_folder, "owncode.nets:net"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owncod.nets:build", r"no module owncod in .*; did you mean owncode\? \(run.code sets the folder"),
        ("owncode.net:build", r"no module owncode.net in .*; did you mean nets\?"),
        ("owncode.nets:biuld", r"owncode.nets has no biuld; did you mean build\?"),
        ("owncode.light:table", r"must be a function or a class, not dict"),
        ("owncode.divides:build", r"ZeroDivisionError: division by zero \(.*/owncode/divides.py, line 2\)"),
        ("owncode.lacks:build", r"No module named 'surely_not_installed' \(.*/owncode/lacks.py, line 1\)"),
        ("owncode.unfinished:build", r"SyntaxError: .* \(.*/owncode/unfinished.py, line 1\)"),
        ("owncode.exits:build", r"owncode.exits cannot be imported: SystemExit: 4 \(.*/owncode/exits.py, line 2\)"),
    ],
)
def test_load_user_code_reports_import_failure_in_one_line(user_code_folder: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_user_code("loss.name", name, str(user_code_folder))
    assert [problem.location for problem in caught.value.problems] == ["loss.name"]
    assert "\n" not in str(caught.value)


def test_load_user_code_reports_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the folder .*nowhere does not exist \(run.code\)"):
        load_user_code("model.name", "surely_not_there:build", str(tmp_path / "nowhere"))


def test_check_user_code_imports_every_name_in_subprocess(
    user_code_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checked = Config.model_validate(
        {
            "run": {"code": str(user_code_folder)},
            "data": {"dataset": "owncode.light:table"},
            "model": {"name": "owncode.light:build"},
            "loss": {"name": "owncode.divides:loss"},
            "augment": {"transform": "owncode.dies:transform"},
        }
    )
    problems = {problem.location: problem.message for problem in check_user_code(checked)}
    assert problems.keys() == {"data.dataset", "loss.name", "augment.transform"}
    assert "not dict" in problems["data.dataset"]
    assert "ZeroDivisionError" in problems["loss.name"]
    assert problems["augment.transform"] == (
        "the process that imported owncode.dies:transform ended with exit code 4; run the code on its own to see why"
    )
    assert capfd.readouterr() == ("", ""), "output of user code must not reach the terminal"
    assert not list(user_code_folder.rglob("dies*.pyc"))


def test_check_user_code_starts_no_process_without_user_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    assert check_user_code(Config()) == []


def test_check_user_code_names_real_time_signal(user_code_folder: Path) -> None:
    number = signal.SIGRTMIN + 1
    (user_code_folder / "owncode" / "killed.py").write_text(f"import os\nos.kill(os.getpid(), {number})\n")
    (problem,) = check_user_code(config(user_code_folder, "owncode.killed:build"))
    assert problem.reason == f"the process that imported owncode.killed:build was killed by signal {number}"


def test_check_user_code_times_out_on_endless_import(user_code_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (user_code_folder / "owncode" / "sleeps.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr("engine.config.user_code._IMPORT_TIMEOUT_SECONDS", 1.0)
    (problem,) = check_user_code(config(user_code_folder, "owncode.sleeps:build"))
    assert problem.message.startswith("owncode.sleeps:build is still being imported after 1 s")


def load_refusal(folder: Path, name: str, packages: tuple[str, ...] = ()) -> str:
    with pytest.raises(UsageError) as caught:
        load_user_code("model.name", name, str(folder), packages)
    (problem,) = caught.value.problems
    assert "\n" not in problem.message
    return problem.message


@pytest.mark.parametrize("name", ["os:system", "subprocess:getoutput", "builtins:eval", "importlib.util:find_spec"])
def test_load_user_code_refuses_standard_library(tmp_path: Path, name: str) -> None:
    assert f"{name} names a module of Python's standard library" in load_refusal(tmp_path, name)


def test_load_user_code_refuses_folder_of_standard_library() -> None:
    message = load_refusal(Path(json.__file__).parent, "decoder:JSONDecoder")
    assert "json/decoder.py belongs to Python's standard library" in message


@pytest.mark.parametrize("name", ["engine.utils.host:available_cores", "typer:Typer", "__main__:main"])
def test_load_user_code_ignores_modules_outside_of_folder(tmp_path: Path, name: str) -> None:
    assert f"no module {name.partition('.')[0].partition(':')[0]} in {tmp_path}" in load_refusal(tmp_path, name)


def test_load_user_code_finds_module_of_allowed_package(tmp_path: Path) -> None:
    # Commands like predict take no config keys, so the settings are named first.
    advice = f"in all commands with the line `run: {{code_packages: [typer]}}` in {settings_file()}, or with"
    assert f"{advice} run.code_packages=typer each time" in load_refusal(tmp_path, "typer.models:Context")
    assert load_user_code("model.name", "typer.models:Context", str(tmp_path), ("typer",)).__name__ == "Context"
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize("package", ["subprocess", "test"])
def test_load_user_code_refuses_standard_library_as_allowed_package(tmp_path: Path, package: str) -> None:
    assert "standard library" in load_refusal(tmp_path, f"{package}:anything", (package,))


def test_load_user_code_refuses_link_out_of_folder(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "outside.py").write_text("def build(): ...\n")
    (tmp_path / "code" / "linked_out.py").symlink_to(tmp_path / "outside.py")
    message = load_refusal(tmp_path / "code", "linked_out:build")
    assert f"links to {tmp_path}/outside.py, outside of {tmp_path}/code" in message


def test_load_user_code_follows_link_of_whole_folder(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "in_linked_folder.py").write_text("def build(): ...\n")
    (tmp_path / "link").symlink_to(tmp_path / "code")
    assert load_user_code("model.name", "in_linked_folder:build", str(tmp_path / "link")).__name__ == "build"


def test_load_user_code_refuses_module_without_source(tmp_path: Path) -> None:
    (tmp_path / "sourceless.py").write_text("def build(): ...\n")
    py_compile.compile(str(tmp_path / "sourceless.py"), cfile=str(tmp_path / "sourceless.pyc"))
    (tmp_path / "sourceless.py").unlink()
    assert "sourceless.pyc is not a .py file" in load_refusal(tmp_path, "sourceless:build")


def test_load_user_code_refuses_name_of_loaded_module(tmp_path: Path) -> None:
    package = tmp_path / "engine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "nets.py").write_text("def build(): ...\n")
    message = load_refusal(tmp_path, "engine.nets:build")
    assert f"engine/__init__.py; rename {package}/nets.py" in message


def test_load_user_code_runs_no_package_of_missing_module(tmp_path: Path) -> None:
    package = tmp_path / "never_imported"
    package.mkdir()
    (package / "__init__.py").write_text("open('ran', 'w')\n")
    assert "no module never_imported.nets" in load_refusal(tmp_path, "never_imported.nets:build")
    assert "never_imported" not in sys.modules


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("os.system", "os is the module os, not a function or a class"),
        ("subprocess", "subprocess is the module subprocess"),
        ("system", "is defined in Python's module posix"),
        ("getoutput", "is defined in Python's module subprocess"),
        ("run_code", "is defined in Python's module builtins"),
        ("Popen", "is defined in Python's module subprocess"),
        ("own.__globals__.get", "is defined in Python's module builtins"),
    ],
)
def test_load_user_code_refuses_standard_library_through_user_module(
    user_code_folder: Path, attribute: str, message: str
) -> None:
    (user_code_folder / "owncode" / "borrows.py").write_text(BORROWS)
    assert message in load_refusal(user_code_folder, f"owncode.borrows:{attribute}")


@pytest.mark.parametrize("attribute", ["own", "Own.method", "cached", "bound", "instance", "Linear"])
def test_load_user_code_accepts_callable_of_user_module(user_code_folder: Path, attribute: str) -> None:
    (user_code_folder / "owncode" / "borrows.py").write_text(BORROWS)
    assert callable(load_user_code("model.name", f"owncode.borrows:{attribute}", str(user_code_folder)))
