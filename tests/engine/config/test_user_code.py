"""User code: import, checks before the start, and one-line error messages."""

from __future__ import annotations

import py_compile
import sys
from pathlib import Path

import pytest
from torch import nn

from engine.base.errors import Problem, UsageError
from engine.base.exits import exit_status
from engine.base.files import settings_file
from engine.config.loader import resolve_config
from engine.config.schema import Config
from engine.config.user_code import check_user_code, load_user_code
from engine.train.models.factory import build_model
from support.messages import has_problem, raises_problem

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


def refusal(code: Path, name: str, **options: object) -> list[Problem]:
    with pytest.raises(UsageError) as caught:
        build_model(config(code, name, **options), 1, 5, 8)
    return caught.value.problems


def test_user_model_receives_input_shape_and_options(user_code_folder: Path) -> None:
    model = build_model(config(user_code_folder, "owncode.nets:build", hidden=7, dropout=0.5), 3, 5, 8)
    assert isinstance(model, nn.Sequential)
    assert [tuple(weights.shape) for weights in model.parameters()] == [(7, 192), (7,), (5, 7), (5,)]
    assert model[2].p == 0.5


def test_user_model_error_names_line(user_code_folder: Path) -> None:
    line = NETS.splitlines().index('    raise KeyError("no such layer")') + 1
    [problem] = refusal(user_code_folder, "owncode.nets:fails")
    values = ("owncode.nets:fails", f"KeyError: 'no such layer' ({user_code_folder}/owncode/nets.py, line {line})")
    assert has_problem([problem], "user-code-failed", "model.name", *values)
    assert "\n" not in str(problem)


def test_user_model_must_return_module(user_code_folder: Path) -> None:
    for name, value in (("owncode.nets:gives_a_dict", "dict"), ("owncode.nets:net", "")):
        assert has_problem(refusal(user_code_folder, name), "invalid-value", "model.name", name, value)


@pytest.mark.parametrize(
    ("name", "code", "values"),
    [
        ("owncod.nets:build", "not-found", ("owncod ", "owncode?", "run.code")),
        ("owncode.net:build", "not-found", ("owncode.net ", "nets?")),
        ("owncode.nets:biuld", "not-found", ("owncode.nets ", "biuld", "build?")),
        ("owncode.nets.py:build", "not-found", ("owncode.nets.py ", "nets?")),
        ("owncode.light:table", "invalid-value", ("dict",)),
        ("owncode.divides:build", "user-code-failed", ("ZeroDivisionError: division by zero (", "divides.py, line 2)")),
        ("owncode.lacks:build", "user-code-failed", ("'surely_not_installed' (", "/owncode/lacks.py, line 1)")),
        ("owncode.unfinished:build", "user-code-failed", ("SyntaxError: ", "/owncode/unfinished.py, line 1)")),
    ],
)
def test_load_user_code_reports_import_failure_in_one_line(
    user_code_folder: Path, name: str, code: str, values: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        load_user_code("loss.name", name, str(user_code_folder))
    [problem] = caught.value.problems
    assert has_problem([problem], code, "loss.name", *values)
    assert "\n" not in str(problem)


@pytest.mark.parametrize("path", ["owncode/nets.py:build", "./owncode/nets.py:build"])
def test_user_code_may_be_named_by_path_of_file(path: str) -> None:
    values = {"model": {"name": path}, "loss": {"name": path}, "eval": {"metrics": [path]}}
    checked = Config.model_validate(values)
    assert (checked.model.name, checked.loss.name, checked.eval.metrics) == (
        *("owncode.nets:build", "owncode.nets:build"),
        ("owncode.nets:build",),
    )


@pytest.mark.parametrize("key", ["model.name", "data.dataset", "optim.name"])
@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/home/a/nets.py:Net", "nets:Net with run.code=/home/a"),
        ("../nets.py:Net", "nets:Net with run.code=.."),
        ("/home/a b/nets.py:Net", "nets:Net with run.code='/home/a b'"),
        ("my-nets.py:Net", "my-nets.py,"),
    ],
)
def test_user_code_path_that_cannot_be_imported_is_explained(key: str, path: str, advice: str) -> None:
    with raises_problem("invalid-value", key, path, "module:name", advice):
        resolve_config(None, [f"{key}={path}"])


def test_check_user_code_imports_every_name_in_subprocess(
    user_code_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checked = Config.model_validate(
        {
            "run": {"code": str(user_code_folder)},
            "data": {"dataset": "owncode.light:table"},
            "model": {"name": "owncode.light:build"},
            "loss": {"name": "owncode.divides:loss"},
        }
    )
    problems = check_user_code(checked)
    assert [problem.location for problem in problems] == ["data.dataset", "loss.name"]
    assert has_problem(problems, "invalid-value", "data.dataset", "dict")
    assert has_problem(problems, "user-code-failed", "loss.name", "ZeroDivisionError")
    assert capfd.readouterr() == ("", ""), "output of user code must not reach the terminal"
    problems = check_user_code(config(user_code_folder, "owncode.dies:build"))
    assert has_problem(problems, "user-code-failed", "model.name", "owncode.dies:build", exit_status(4))
    assert not list(user_code_folder.rglob("dies*.pyc"))


def test_check_user_code_times_out_on_endless_import(user_code_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (user_code_folder / "owncode" / "sleeps.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr("engine.config.user_code._IMPORT_TIMEOUT_SECONDS", 1.0)
    (problem,) = check_user_code(config(user_code_folder, "owncode.sleeps:build"))
    assert has_problem([problem], "timed-out", "model.name", "owncode.sleeps:build", "1 s")


def is_refused(code: str, folder: Path, name: str, *values: object, packages: tuple[str, ...] = ()) -> bool:
    """Whether loading `name` from `folder` fails with one problem of this code, whose only line has all `values`."""
    with pytest.raises(UsageError) as caught:
        load_user_code("model.name", name, str(folder), packages)
    (problem,) = caught.value.problems
    return has_problem([problem], code, "model.name", *values) and "\n" not in problem.message


@pytest.mark.parametrize("name", ["os:system", "subprocess:getoutput", "builtins:eval", "importlib.util:find_spec"])
def test_load_user_code_refuses_standard_library(tmp_path: Path, name: str) -> None:
    assert is_refused("standard-library", tmp_path, name, name)


@pytest.mark.parametrize("name", ["engine.base.host:available_cores", "typer:Typer", "__main__:main"])
def test_load_user_code_ignores_modules_outside_of_folder(tmp_path: Path, name: str) -> None:
    package = name.partition(".")[0].partition(":")[0]
    assert is_refused("not-found", tmp_path, name, f"{name}: ", f" {package} ", tmp_path)


def test_load_user_code_finds_module_of_allowed_package(tmp_path: Path) -> None:
    # Commands like predict take no config keys, so the settings are named first.
    advice = ("`run: {code_packages: [typer]}`", settings_file(), "run.code_packages=typer")
    assert is_refused("not-found", tmp_path, "typer.models:Context", *advice)
    assert load_user_code("model.name", "typer.models:Context", str(tmp_path), ("typer",)).__name__ == "Context"
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize("package", ["subprocess", "test"])
def test_load_user_code_refuses_standard_library_as_allowed_package(tmp_path: Path, package: str) -> None:
    assert is_refused("standard-library", tmp_path, f"{package}:anything", packages=(package,))


def test_load_user_code_refuses_link_out_of_folder(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "outside.py").write_text("def build(): ...\n")
    (tmp_path / "code" / "linked_out.py").symlink_to(tmp_path / "outside.py")
    values = (tmp_path / "outside.py", tmp_path / "code")
    assert is_refused("is-link", tmp_path / "code", "linked_out:build", *values)


def test_load_user_code_refuses_module_without_source(tmp_path: Path) -> None:
    (tmp_path / "sourceless.py").write_text("def build(): ...\n")
    py_compile.compile(str(tmp_path / "sourceless.py"), cfile=str(tmp_path / "sourceless.pyc"))
    (tmp_path / "sourceless.py").unlink()
    assert is_refused("wrong-format", tmp_path, "sourceless:build", "sourceless.pyc", ".py ")


def test_load_user_code_refuses_name_of_loaded_module(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("def build(): ...\n")
    assert is_refused("ambiguous-name", tmp_path, "typer:build", "typer/__init__.py", tmp_path / "typer.py")


def test_load_user_code_runs_no_package_of_missing_module(tmp_path: Path) -> None:
    package = tmp_path / "never_imported"
    package.mkdir()
    (package / "__init__.py").write_text("open('ran', 'w')\n")
    assert is_refused("not-found", tmp_path, "never_imported.nets:build", "never_imported.nets ")
    assert "never_imported" not in sys.modules


def test_load_user_code_refuses_what_cannot_be_called(user_code_folder: Path) -> None:
    (user_code_folder / "owncode" / "borrows.py").write_text(BORROWS)
    assert is_refused("invalid-value", user_code_folder, "owncode.borrows:subprocess", "owncode.borrows:subprocess")


@pytest.mark.parametrize("attribute", ["own", "Own.method", "cached", "bound", "instance", "Linear"])
def test_load_user_code_accepts_callable_of_user_module(user_code_folder: Path, attribute: str) -> None:
    (user_code_folder / "owncode" / "borrows.py").write_text(BORROWS)
    assert callable(load_user_code("model.name", f"owncode.borrows:{attribute}", str(user_code_folder)))


def test_user_model_reports_all_invalid_options_together(user_code_folder: Path) -> None:
    problems = refusal(user_code_folder, "owncode.nets:build", hiden=7, num_classes=3)
    assert has_problem(problems, "unknown-key", "model.options", "owncode.nets:build", "'hiden'", "hidden?")
    assert has_problem(problems, "missing-value", "model.options", "owncode.nets:build", "hidden")
    assert has_problem(problems, "fixed-value", "model.options", "num_classes")


def test_load_user_code_reports_missing_folder(tmp_path: Path) -> None:
    with raises_problem("not-found", "model.name", tmp_path / "nowhere", "(run.code)"):
        load_user_code("model.name", "surely_not_there:build", str(tmp_path / "nowhere"))
