"""Whose user code a config names: the files that name it, and the files and folders that it is imported from.

A config or a checkpoint of another user is data, and so is code that other users can change: it runs only
with `--trust-code`. `engine.config.loader` and `engine.train.inference.trained_model` find who named the code. The
preflight, the inference and the commands that build a model call `CodeTrust.check` before anything is imported. The
ranks do not check again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from engine.base.errors import Problem, UsageError, raise_if_any
from engine.base.trust import foreign_path_reason
from engine.config.schema import Config
from engine.config.user_code import TRUST_ADVICE, UserModule, find_user_module, user_code_names
from engine.config.user_errors import code_root


@dataclass(frozen=True)
class CodeTrust:
    """Who named the user code of a config, and whether the user trusts it (`granted`, the flag `--trust-code`).

    `foreign` maps each key that the user did not set, such as `model.name` or `run.code`, to the reason why. `notify`
    receives one message for each name that runs only because trust is granted.
    """

    granted: bool = False
    foreign: Mapping[str, str] = field(default_factory=dict)
    notify: Callable[[Problem], None] = lambda _: None

    def check(self, config: Config, keys: Collection[str] | None = None) -> None:
        """Check the code that these keys name, by default all, without importing it.

        Raises UsageError if somebody else named it or can change it, and trust is not granted.
        """
        problems: list[Problem] = []
        named = [(key, name) for key, names in user_code_names(config).items() for name in names]
        for key, name in named:
            if keys is not None and key not in keys:
                continue
            module = _find(key, name, config)
            reasons = [self.foreign[source] for source in (key, "run.code") if source in self.foreign]
            if (reason := _foreign_reason(module)) is not None:
                reasons.append(reason)
            if not reasons:
                continue
            if not self.granted:
                problems.append(
                    Problem(key, f"{name} is not imported: {'; '.join(reasons)}", TRUST_ADVICE, code="untrusted-code")
                )
                continue
            # What cannot be found is refused by its import.
            if module.files or module.root is None:
                file = module.files[-1] if module.files else f"the package {module.name}"
                reason = f"--trust-code: {key} imports {name} from {file}, although {'; '.join(reasons)}"
                self.notify(Problem("", reason, code="untrusted-code"))
        raise_if_any(problems)


def _find(key: str, name: str, config: Config) -> UserModule:
    try:
        return find_user_module(key, name, config.run.code, config.run.code_packages)
    except UsageError:
        # Others could add the module to a folder that they can write to.
        return UserModule(name.partition(":")[0], code_root(config.run.code))


def _foreign_reason(module: UserModule) -> str | None:
    """Return why others can change a module: its file, its compiled file, or a folder that one of them is in.

    The modules that it imports are not examined: in a folder that only this user can write to, this user added them.
    """
    if module.root is None:
        return None
    packages = accumulate(module.name.split(".")[:-1], Path.joinpath, initial=module.root)
    compiled = [Path(importlib.util.cache_from_source(str(file))) for file in module.files]
    for path in (*packages, *module.files, *(file.parent for file in compiled), *compiled):
        # What is missing is refused by the import.
        with suppress(OSError):
            if (reason := foreign_path_reason(path)) is not None:
                return f"{path} {reason}"
    return None
