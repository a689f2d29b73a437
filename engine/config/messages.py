"""Convert pydantic's validation errors to problems that name the key and the allowed values.

Called by `engine.config.loader`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

from pydantic_core import ErrorDetails

from engine.base.errors import Problem, did_you_mean
from engine.config.key_names import REMOVED_KEYS, key_hint
from engine.config.notify_section import OCCASIONS, REFERENCE_ADVICE, URLS_KEY
from engine.config.rules import PACK_ADVICE, PACKED_PROBLEM
from engine.config.schema import fields, sections
from engine.config.section import USER_CODE_FILE
from engine.config.tasks import CLASS_METRICS

# YAML aliases expand exponentially: the full repr of a few lines can fill the memory.
_value_repr = reprlib.Repr()
_value_repr.maxlevel = 2
_value_repr.maxstring = _value_repr.maxlong = _value_repr.maxother = 200

# Keys of a union type, for which pydantic reports one error per member, and lists, for which it reports an item.
_KEY_MESSAGES = {
    "run.code_packages": "must be names of top-level packages, such as [torchvision]",
    "data.workers": "must be an integer of at least 0, or auto",
    "data.batch_size": "must be an integer of at least 1, or auto",
    "optim.betas": "must be two numbers, such as [0.9, 0.999]",
    "augment.crop_scale": "must be two numbers, such as [0.08, 1]",
    "augment.crop_ratio": "must be two numbers, such as [0.75, 1.33]",
    "augment.scale": "must be two numbers, such as [0.8, 1.2]",
    "eval.metrics": f"must be {', '.join(CLASS_METRICS)}, or names of user code, such as [metrics:f1]",
    "model.freeze": "must be none, backbone, or parameter name prefixes such as [layer1, layer2]",
    "queue.time_limit": "must be a number of minutes from 0 to 1000000, such as 90, or a time such as 8h",
    "optim.clip_norm_type": "must be a number greater than 0, or inf",
    "notify.when": f"must be a list of {', '.join(OCCASIONS)}",
}

# Values that a key accepts besides its choices.
EXTRA_ALLOWED_FORMS = {
    "data.dataset": "user code as module:name",
    "loss.name": "user code as module:name",
    "optim.name": "timm:NAME, or user code as module:name",
    "schedule.name": "user code as module:name",
}

# Codes of problems by the type of pydantic's error; all others are invalid values.
_CODES = {
    "literal_error": "unknown-value",
    **dict.fromkeys(("greater_than", "greater_than_equal", "less_than", "less_than_equal"), "out-of-range"),
    "finite_number": "non-finite",
    "run_name": "invalid-name",
    **dict.fromkeys(("missing", "too_short"), "missing-value"),
    **dict.fromkeys(("too_long", "too_many_values"), "too-many"),
}


def problem_from_pydantic(detail: ErrorDetails, files: Mapping[str, str]) -> Problem:
    """Convert one pydantic error; `files` maps a key to the file that sets it."""
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location[:2])
    source = files.get(key, "")
    if detail["type"] == "extra_forbidden":
        if len(location) == 1:
            hint = did_you_mean(key, sections()) or key_hint(key)
            return Problem(
                key,
                f"unknown section; must be one of {', '.join(sections())}{hint}",
                source=source,
                code="unknown-key",
            )
        if key in REMOVED_KEYS:
            reason = f"no longer exists: {REMOVED_KEYS[key].reason}"
            return Problem(key, reason, "remove it", source=source, code="unknown-key")
        return Problem(key, f"unknown key{key_hint(key)}", source=source, code="unknown-key")
    if key == URLS_KEY:
        # Without the value, which may be a URL with a password or a token.
        return Problem(
            key, "has an entry that is neither env:NAME nor file:PATH", REFERENCE_ADVICE, source, code="invalid-value"
        )
    value = detail["input"]
    if (key, value) == ("data.dataset", "packed"):
        return Problem(key, f"'packed' is a {PACKED_PROBLEM}", PACK_ADVICE, source, code="not-supported")
    allowed = detail["msg"][0].lower() + detail["msg"][1:]
    if key in _KEY_MESSAGES and detail["type"] != USER_CODE_FILE:
        allowed = _KEY_MESSAGES[key]
    elif detail["type"] == "literal_error":
        choices = str(detail.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ")
        extra = f", or {EXTRA_ALLOWED_FORMS[key]}" if key in EXTRA_ALLOWED_FORMS else ""
        hint = did_you_mean(value, choices.split(", ")) if isinstance(value, str) else ""
        allowed = f"must be one of {choices}{extra}{hint}"
    elif detail["type"] == "string_pattern_mismatch":
        allowed = "must start with a letter or digit and contain only letters, digits, dots, dashes and underscores"
    elif detail["type"] in ("missing", "too_short", "too_long"):
        allowed = f"wrong number of values; the default is {dict(fields())[key].default}"
    for our_phrase, pydantic_phrase in (
        ("must be", "input should be"),
        ("must have", "input should have"),
        ("must have", "value should have"),
        ("an integer", "a valid integer"),
        ("a number", "a valid number"),
        ("true or false", "a valid boolean"),
        ("text", "a valid string"),
        ("a mapping such as {name: value}", "a valid dictionary"),
        ("a list", "a valid tuple"),
    ):
        allowed = allowed.replace(pydantic_phrase, our_phrase)
    shown = "an empty value (null)" if value is None else _value_repr.repr(value)
    reason = f"{shown} is not allowed: {allowed}"
    if (code := _CODES.get(detail["type"])) is not None:
        return Problem(key, reason, source=source, code=code)
    return Problem(key, reason, source=source, code="invalid-value")
