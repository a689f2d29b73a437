"""Config layers, validation and error messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.base.errors import Problem, UsageError
from engine.config.loader import resolve_config
from engine.config.schema import Config, as_dict, fields
from engine.config.yaml_io import parse_yaml, to_yaml
from support.messages import has_problem, raises_problem, says
from support.runs.trained_run import call


def problems(*overrides: str, file: str | None = None) -> list[Problem]:
    with pytest.raises(UsageError) as caught:
        resolve_config(file, overrides)
    return caught.value.problems


def locations(*overrides: str) -> list[str]:
    return [problem.location for problem in problems(*overrides)]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_config_fields_have_one_line_description() -> None:
    for key, field in fields():
        assert field.description, key
        assert "\n" not in field.description
        assert field.description.endswith("."), key


def test_resolve_resets_optimizer_parameters_when_optimizer_changes() -> None:
    before = resolve_config("cifar10-fast").config.optim
    assert (before.momentum, before.nesterov) == (0.9, True)
    after = resolve_config("cifar10-fast", ["optim.betas=[0.8, 0.9]", "optim.name=adamw"]).config.optim
    assert (after.momentum, after.nesterov, after.betas) == (None, None, (0.8, 0.9))
    assert (after.lr, after.weight_decay) == (0.001, before.weight_decay)
    assert resolve_config("cifar10-fast", ["optim.name=sgd"]).config.optim == before


@pytest.mark.parametrize(
    ("file", "overrides", "lr", "is_named"),
    [
        ("{}", [], 0.05, False),
        ("{optim: {name: AdamW}}", [], 0.001, False),
        ("{optim: {lr: 0.4}}", ["optim.name=sgd"], 0.4, False),
        ("{optim: {lr: 0.4}}", ["optim.name=adamw"], 0.001, True),
        ("{optim: {lr: 0.4}}", ["optim.name=adamw", "optim.lr=0.3"], 0.3, False),
        ("{optim: {name: adam, lr: 0.4}}", [], 0.4, False),
        ("{optim: {lr: 0.001}}", ["optim.name=timm:lamb"], 0.001, False),
        ("{optim: {lr: 0.4}}", ["optim.lr=null"], 0.05, False),
    ],
)
def test_learning_rate_is_default_of_optimizer_unless_it_is_set_for_it(
    tmp_path: Path, file: str, overrides: list[str], lr: float, *, is_named: bool
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(file)
    resolved = resolve_config(str(path), overrides)
    assert resolved.config.optim.lr == lr
    found = [warning for key, warning in resolved.no_effect if key == "optim.lr"]
    assert len(found) == is_named
    assert not found or has_problem(found, "no-effect", "", "optim.lr=0.4 ", "optim.name=adamw", " 0.001 ", "--lr")


def test_config_describe_lists_every_key_with_allowed_values() -> None:
    output = call("config", "describe").stdout
    assert "optim.momentum\n    Momentum factor. Default: 0.9 for sgd, " in output
    assert "augment.policy\n    Automatic augmentation: none, " in output
    assert "One of none, randaugment, trivialaugment. [default: none]" in output
    assert "huber, or user code as module:name. [default: auto]" in output
    keys = [*(key for key, _ in fields()), "limits.gpus", "limits.runs", "limits.hours"]
    assert [line for line in output.splitlines() if not line.startswith(" ")] == keys


def test_resolve_reports_value_errors_together_with_conflicts() -> None:
    reported = locations("optim.lr=high", "schedule.name=multistep", "augment.crop_scale=[2, 1]", "run.resume=true")
    assert reported == ["optim.lr", "run.resume", "augment.crop_scale", "schedule.milestones"]
    assert locations("run.epochs=many", "schedule.warmup_epochs=20") == ["run.epochs"]


def test_resolve_refuses_run_folder_for_config(tmp_path: Path) -> None:
    for name in ("config.yaml", "events.jsonl"):
        (tmp_path / name).touch()
    assert has_problem(problems(file=str(tmp_path)), "not-a-file", str(tmp_path), f"{tmp_path}/config.yaml")


def test_resolve_gives_later_layers_precedence(tmp_path: Path) -> None:
    write(tmp_path / "grand.yaml", "run: {epochs: 1, seed: 1}\noptim: {lr: 0.1}")
    write(tmp_path / "base.yaml", "base: grand.yaml\nrun: {epochs: 2}")
    file = write(tmp_path / "own.yaml", "base: [base.yaml]\nrun: {log_every: 3}")
    resolved = resolve_config(file, ["optim.lr=0.3"], {"run.seed": ("--seed 4", 4)})
    run, optim = resolved.config.run, resolved.config.optim
    assert (run.epochs, run.seed, run.log_every, optim.lr) == (2, 4, 3, 0.3)
    assert resolved.sources["run.epochs"].endswith("base.yaml")
    assert resolved.sources["run.log_every"] == file
    assert resolved.sources["run.seed"] == "--seed 4"
    assert resolved.sources["optim.lr"] == "optim.lr=0.3"
    assert resolved.sources["optim.momentum"] == "default"


def test_base_is_a_file_beside_the_config_else_a_preset(tmp_path: Path) -> None:
    file = write(tmp_path / "own.yaml", "base: digits\nrun: {log_every: 3}")
    config = resolve_config(file).config
    assert config.run.log_every == 3 and config.optim == resolve_config("digits").config.optim
    write(tmp_path / "digits", "run: {epochs: 77}")
    assert resolve_config(file).config.run.epochs == 77


def test_resolve_rejects_circular_bases(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "base: b.yaml")
    write(tmp_path / "b.yaml", "base: a.yaml")
    (problem,) = problems(file=str(tmp_path / "a.yaml"))
    assert has_problem([problem], "invalid-value", "base", "a.yaml -> ")


def test_resolve_reports_all_errors_with_allowed_values() -> None:
    reported = problems(
        "optim.lrr=1", "run.epochs=many", "optim.name=sgdd", "run.seed=-1", "modle.name=cnn", "data.workers=x"
    )
    assert has_problem(reported, "unknown-key", "optim.lrr", "optim.lr?")
    assert has_problem(reported, "invalid-value", "run.epochs", "'many'", "integer")
    allowed = ("sgd, adam, adamw, ", "timm:NAME", "module:name", "sgd?")
    assert has_problem(reported, "unknown-value", "optim.name", "'sgdd'", *allowed)
    assert has_problem(reported, "out-of-range", "run.seed", "-1 ", " 0")
    assert has_problem(reported, "unknown-key", "modle", "model?")
    assert has_problem(reported, "invalid-value", "data.workers", "'x'", "integer", " 0", "auto")
    assert len(reported) == 6


def test_resolve_names_file_of_invalid_key(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "run: {epochs: none}")
    [problem] = problems(file=file)
    assert has_problem([problem], "invalid-value", "run.epochs", "'none'", f"run.epochs (in {file}): ")


def test_resolve_refuses_removed_key_unless_a_file_holds_its_default(tmp_path: Path) -> None:
    stored, chosen = tmp_path / "stored.yaml", tmp_path / "chosen.yaml"
    stored.write_text("data: {dataset: digits, decoder: auto}\n")
    chosen.write_text("data: {dataset: digits, decoder: gpu}\n")
    assert resolve_config(str(stored)).config.data.dataset == "digits"
    with raises_problem("unknown-key", "data.decoder", "decoded on the CPU"):
        resolve_config(str(chosen))


def test_resolve_ignores_removed_key_of_a_run(tmp_path: Path) -> None:
    file = write(tmp_path / "config.yaml", "data: {dataset: digits, shuffle: blocks}\noptim: {muon_conv: 'on'}\n")
    assert [problem.location for problem in problems(file=file)] == ["data.shuffle", "optim.muon_conv"]
    (tmp_path / "events.jsonl").touch()
    muon, shuffle = resolve_config(file, ["run.resume=true", "run.name=a"]).no_effect
    assert (shuffle.key, muon.key) == ("data.shuffle", "optim.muon_conv")
    assert has_problem([shuffle.warning], "no-effect", "", "data.shuffle=blocks ", " are shuffled")


def test_resolve_suggests_section_for_bare_key() -> None:
    [problem] = problems("lr=1")
    assert has_problem([problem], "unknown-key", "lr", "section.key=value", "optim.lr?")


def test_resolve_rejects_conflicting_values_for_one_key() -> None:
    with raises_problem("conflict", "optim.lr", "--lr 0.1", "optim.lr=0.2"):
        resolve_config(None, ["optim.lr=0.2"], {"optim.lr": ("--lr 0.1", 0.1)})
    assert resolve_config(None, ["optim.lr=0.1"], {"optim.lr": ("--lr 0.1", 0.1)}).config.optim.lr == 0.1


@pytest.mark.parametrize(
    ("text", "value"),
    [("off", "off"), ("no", "no"), ("1e-3", 0.001), ("010", 10), ("1:30", "1:30"), ("true", True), ("[1, 2]", [1, 2])],
)
def test_parse_yaml_reads_scalars_as_yaml_1_2(text: str, value: object) -> None:
    assert parse_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "code", "location", "value"),
    [
        ("run: [1", "invalid-yaml", "{}, line 1", ""),
        ("run: {epochs: 1}\nrun: {seed: 1}", "invalid-yaml", "{}, line 2", " run "),
        ("- 1", "wrong-format", "{}", ", data, "),
        ("run: 3", "invalid-value", "run", "int"),
        ("model: resnet18", "invalid-value", "model", "model.name?"),
        ("optimizer: {name: adam}", "unknown-key", "optimizer", "optim?"),
        ("base: 3", "invalid-value", "{}", "base: "),
        ("? [a, b]\n: 1", "invalid-yaml", "{}, line 1", ""),
    ],
)
def test_resolve_rejects_file_that_is_not_a_config(
    tmp_path: Path, text: str, code: str, location: str, value: str
) -> None:
    file = write(tmp_path / "a.yaml", text)
    (problem,) = problems(file=file)
    assert has_problem([problem], code, location.format(file), value), problem


def test_resolve_suggests_nearest_preset_for_missing_file() -> None:
    (problem,) = problems(file="nowhere/digit.yaml")
    assert has_problem([problem], "not-found", "nowhere/digit.yaml", "digits?")


@pytest.mark.parametrize("name", ["1e3", "08", "010", "off", "1_000", "2001-01-01", "1.", "0x1", "null", "true"])
def test_to_yaml_quotes_names_that_look_like_numbers(name: str) -> None:
    config = Config.model_validate({"run": {"name": name}})
    assert Config.model_validate(parse_yaml(to_yaml(as_dict(config)))).run.name == name


def test_config_command_prints_yaml_diff_sources_and_json() -> None:
    full = parse_yaml(call("config", "digits", "optim.lr=0.2").stdout)
    assert full["optim"]["lr"] == 0.2
    assert full["checkpoint"]["keep"] == 3
    difference = parse_yaml(call("config", "digits", "optim.lr=0.05", "--diff").stdout)
    assert difference["run"] == {"epochs": 15}
    assert "lr" not in difference["optim"]
    rows = json.loads(call("config", "digits", "optim.lr=0.2", "--sources", "--json").stdout)["config"]
    assert rows["optim.lr"] == {"value": 0.2, "source": "optim.lr=0.2"}
    assert rows["run.epochs"]["source"].endswith("digits.yaml")
    assert rows["run.seed"]["source"] == "default"
    assert any(
        line.split() == ["run.seed", "=", "0", "default"] for line in call("config", "--sources").stdout.splitlines()
    )


def test_config_command_resolves_flags_of_run_without_data_path() -> None:
    printed = call("config", "flowers", "--lr", "0.3", "--ngpu", "2", "--after", "a,b", "--diff", "--json")
    values = json.loads(printed.stdout)["config"]
    assert (values["optim"]["lr"], values["device"]["gpus"]) == (0.3, "free:2")
    assert values["queue"] == {"after": ["a", "b"]}
    assert printed.exit_code == 0
    assert says(printed.stderr, "missing-value", "warning: data.path: ", "data.path (--data-path)")
    assert printed.stderr.count("\n") == 1


def test_resolve_with_missing_value_refuses_invalid_values() -> None:
    assert resolve_config("flowers", allow_missing=True).missing[0].location == "data.path"
    with pytest.raises(UsageError) as refused:
        resolve_config("flowers", ["optim.lr=-1"], allow_missing=True)
    assert {problem.location for problem in refused.value.problems} == {"optim.lr", "data.path"}
    assert resolve_config("digits", allow_missing=True).missing == ()


# Aliases that expand to 10**12 items ("billion laughs").
BILLION_LAUGHS = "\n".join(
    ["x0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    + [f"x{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 12)]
)

MERGED_LAUGHS = "\n".join(
    ["x0: &a0 {k: v}"]
    + [f"x{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}]}}" for level in range(1, 12)]
)


UNREADABLE = {
    "empty float": ("run: {epochs: !!float }", "invalid-yaml", ""),
    "invalid bool": ("run: {resume: !!bool maybe}", "invalid-yaml", ""),
    "invalid date": ("run: {name: !!timestamp 2001-99-99}", "invalid-yaml", ""),
    "deep nesting": ("run: {epochs: " + "[" * 5000, "too-large", "a.yaml, line 1: ", " 50 "),
    "long integer": (f"run: {{epochs: {'9' * 5000}}}", "invalid-yaml", "(ValueError"),
    "half a character": ('"\\ud800": 1', "invalid-yaml", "(UnicodeEncodeError"),
    "recursive alias": ("run: &run {epochs: *run}", "invalid-yaml", "found unconstructable recursive node"),
    "aliases as options": (
        f"{BILLION_LAUGHS}\nmodel: {{options: {{a: *a11}}}}",
        *("too-large", "a.yaml", " 20,000 "),
    ),
    "many options": (
        f"model: {{options: {{a: &a [{'1,' * 100}], b: [{'*a,' * 110}]}}}}",
        *("too-many", "model.options", " 10,000 "),
    ),
    "aliases that nobody uses": (BILLION_LAUGHS, "too-large", "a.yaml, line 5: ", " 20,000 "),
    "merged aliases": (MERGED_LAUGHS, "too-large", " 20,000 "),
}


@pytest.mark.parametrize("case", UNREADABLE.values(), ids=UNREADABLE)
def test_resolve_rejects_unconstructible_yaml_values(tmp_path: Path, case: tuple[str, ...]) -> None:
    text, code, *values = case
    reported = problems(file=write(tmp_path / "a.yaml", text))
    assert has_problem(reported, code, None, *values), reported
    # The message must not contain the expanded aliases.
    assert all(len(str(problem)) < 1000 for problem in reported)


def test_resolve_limits_base_files(tmp_path: Path) -> None:
    for level in range(9):
        write(tmp_path / f"{level}.yaml", f"base: [{f'{level + 1}.yaml, ' * 10}]\n")
    write(tmp_path / "9.yaml", "run: {epochs: 3}\n")
    first = str(tmp_path / "0.yaml")
    [problem] = problems(file=first)
    assert has_problem([problem], "too-many", first, " 100 ")
