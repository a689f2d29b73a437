"""Usage errors: problems with a config, a flag or a file that the user can correct.

The CLI prints them and exits with code 2; the form shows them beside their fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

# Libraries that an extra of gputrain installs together: they work only in a combination of versions.
EXTRAS = {
    **dict.fromkeys(("torch", "torchvision", "safetensors"), "train"),
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "onnx"),
    **dict.fromkeys(("jinja2", "matplotlib"), "report"),
    "ray": "ray",
}
# Fewer letters begin too many words.
MIN_PREFIX_LETTERS = 3
# Ratio of matching characters (difflib).
MIN_SIMILARITY = 0.66


@dataclass(frozen=True)
class Problem:
    """One problem.

    `location` is a config key, a flag or a file; `source` is the file that sets the key. `advice` is what to do, for
    callers that show it apart from the `reason`. `others` are the keys that the value conflicts with. `is_missing`
    means that the key has no value, and that a run needs one. `code` is the kind of problem, such as `not-found`: it
    stays the same when the words change, so programs and tests compare it. It is no part of the text that users see.
    """

    location: str
    reason: str
    advice: str = ""
    source: str = ""
    others: tuple[str, ...] = ()
    is_missing: bool = False
    code: str = field(kw_only=True)

    @property
    def message(self) -> str:
        """The reason, followed by the advice."""
        return f"{self.reason}; {self.advice}" if self.advice else self.reason

    @property
    def label(self) -> str:
        """The location, with the file that sets the key."""
        return f"{self.location} (in {self.source})" if self.source else self.location

    def __str__(self) -> str:
        return f"{self.label}: {self.message}" if self.location else self.message


class UsageError(Exception):
    """The request cannot be carried out. Holds all problems."""

    def __init__(self, problems: Sequence[Problem] | str) -> None:
        if isinstance(problems, str):
            # The DataLoader recreates an error of its worker from the message alone.
            problems = [Problem("", problems, code="worker-failed")]
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = list(problems)

    @classmethod
    def one(cls, location: str, reason: str, advice: str = "", *, code: str) -> UsageError:
        """Create an error with a single problem."""
        return cls([Problem(location, reason, advice, code=code)])


class CodedError(Exception):
    """An error whose message is for the user. `code` is the kind of problem, as in `Problem`.

    A subclass with a single kind sets it for the class: the DataLoader recreates an error of its worker from the
    message alone.
    """

    code = "internal-error"

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code or self.code


@contextmanager
def collect_problems(problems: list[Problem]) -> Iterator[None]:
    """Append the problems of a UsageError raised in the block to `problems` instead of raising it."""
    try:
        yield
    except UsageError as error:
        problems += error.problems


@contextmanager
def file_errors(location: str, reason: str, advice: str = "", *, code: str = "not-readable") -> Iterator[None]:
    """Raise UsageError in place of an OSError in the block: `reason`, such as `cannot be read`, and what the system
    says."""
    try:
        yield
    except OSError as error:
        raise UsageError.one(location, f"{reason}: {error.strerror or error}", advice, code=code) from error


def raise_if_any(problems: Sequence[Problem]) -> None:
    """Raise UsageError if there are problems."""
    if problems:
        raise UsageError(problems)


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean X?` for the closest known word, or an empty string if none is close or `word` is a
    path."""
    found = None if "/" in word else nearest(word, candidates)
    return f"; did you mean {found}?" if found is not None else ""


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that `word` most likely means: it is the start of it, or similar; None if none is close.

    Case and the minus signs of options do not count.
    """
    # Takes 2 ms, and few programs need it.
    from difflib import get_close_matches

    typed = _folded(word)
    by_folded = {_folded(candidate): candidate for candidate in candidates}
    longer = [folded for folded in by_folded if folded.startswith(typed)]
    if longer and len(typed) >= MIN_PREFIX_LETTERS:
        return by_folded[min(longer, key=len)]
    similar = get_close_matches(typed, by_folded, 1, MIN_SIMILARITY)
    return by_folded[similar[0]] if similar else None


def _folded(word: str) -> str:
    return word.lstrip("-").casefold()


def not_installed(library: str) -> str:
    """Return the message for a missing optional library. gputrain is on no package index, so an extra needs a clone."""
    if library in EXTRAS:
        return f"{library} is not installed; in a clone of gputrain: pip install '.[{EXTRAS[library]}]'"
    return f"{library} is not installed: pip install {library}"
