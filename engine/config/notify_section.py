"""Config section `notify`: when a run sends a message, and where to. Its entries refer to secrets and hold none.

`engine.jobs.notify.sender` reads what the references stand for.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, Strict

from engine.config.section import Section, as_list

Occasion = Literal[
    "finished", "stopped", "failed", "restarted", "crashed", "stalled", "slowed", "granted", "nan", "held"
]
OCCASIONS: tuple[Occasion, ...] = get_args(Occasion)
# A stop is what the user requested, and a restart needs nobody.
DEFAULT_OCCASIONS: tuple[Occasion, ...] = (
    "finished",
    "failed",
    "crashed",
    "stalled",
    "slowed",
    "granted",
    "nan",
    "held",
)
FILE_PREFIX = "file:"
# A path never contains ://, but a URL that was written with one of the prefixes does.
REFERENCE_PATTERN = r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:([^:\x00-\x1f]|:[^/\x00-\x1f]|:/[^/\x00-\x1f])+)$"
REFERENCE_ADVICE = (
    "a URL contains secrets, so put it into an environment variable (env:NAME) or a file of mode 0600 (file:PATH); "
    "gputrain doctor --help shows how"
)
URLS_KEY = "notify.urls"
MAX_REFERENCES = 20
Reference = Annotated[str, Field(pattern=REFERENCE_PATTERN, max_length=4096)]


class NotifyConfig(Section):
    """Section `notify`: messages about a run."""

    urls: Annotated[tuple[Reference, ...], BeforeValidator(as_list), Strict(False)] = Field(
        (),
        max_length=MAX_REFERENCES,
        title="message URLs",
        description="Where to send messages, besides the URLs in ~/.config/gputrain/notify. Example: [env:NTFY, "
        "file:PATH]. env:NAME is a variable that holds an apprise URL; file:PATH is a file of mode 0600 "
        "with one URL per line.",
    )
    when: Annotated[tuple[Occasion, ...], BeforeValidator(as_list), Strict(False)] = Field(
        DEFAULT_OCCASIONS,
        title="message when",
        description="Occasions that send a message; [] sends none. They are finished, stopped, failed, restarted, "
        "crashed, stalled, slowed (a throttled GPU), granted (GPUs, after a wait), nan (a loss of a "
        "command that is NaN or infinite), held (waiting runs, because others of their batch failed at "
        "once).",
    )
    min_minutes: float = Field(
        0.0,
        ge=0,
        title="least minutes",
        description="Minutes that a run must take for a message about its end. It applies to runs that finished or "
        "were stopped.",
    )
    stall_minutes: float = Field(
        5.0,
        ge=0,
        title="stall minutes",
        description="Minutes without progress until a run counts as stalled; 0 disables. A run whose steps or "
        "evaluations take longer has more time.",
    )
