"""`notify.urls` holds references only: a URL is refused, and no message repeats it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.errors import UsageError
from engine.base.trust import foreign_reason
from engine.config.loader import ConfigError, resolve_config
from support.messages import has_problem

SECRET = "Tsecret123"  # noqa: S105 (made up)


@pytest.mark.parametrize(
    "typed",
    [
        [f"notify.urls=slack://{SECRET}/b"],
        [f"notify.urls=[slack: //{SECRET}: x"],
        [f"notify.urls=file:slack://{SECRET}"],
        [f"notify.urls=[env:A, {SECRET}]"],
        [f"notify.urls=slack://{SECRET}/b", f"notify.urls=slack://{SECRET}/c"],
        [f"notify.url=slack://{SECRET}"],
        [f"notify=slack://{SECRET}"],
        [f"notify.urls={{a: slack://{SECRET}}}"],
    ],
)
def test_url_on_command_line_is_refused_without_showing_it(typed: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        resolve_config("digits", typed)
    assert SECRET not in str(refused.value)


def test_url_in_config_file_is_refused_with_advice_and_without_showing_it(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"notify: {{urls: ['mailto://me:{SECRET}@example.org']}}")
    with pytest.raises(ConfigError) as refused:
        resolve_config(str(file))
    assert SECRET not in str(refused.value)
    assert has_problem(refused.value.problems, "invalid-value", "notify.urls", "env:NAME")
    assert refused.value.valid_part.notify.urls == ()


def test_foreign_config_cannot_choose_destinations(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("notify: {urls: [env:AWS_SECRET_ACCESS_KEY]}")
    file.chmod(0o666)
    with pytest.raises(ConfigError) as refused:
        resolve_config(str(file))
    assert has_problem(refused.value.problems, "untrusted-code", "notify.urls", file, foreign_reason(file.stat()))
    assert refused.value.valid_part.notify.urls == ()
    assert resolve_config(str(file), ["notify.urls=[]"]).config.notify.urls == ()
    assert resolve_config(str(file), ["notify.urls=env:MINE"]).config.notify.urls == ("env:MINE",)
    assert resolve_config(str(file), trust_code=True).config.notify.urls == ("env:AWS_SECRET_ACCESS_KEY",)
