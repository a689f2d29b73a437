"""Errors that a user can fix: a list of problems, each with the key, the reason and the advice.

The CLI, the form and the log print them; the exit code is 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem in what the user requested."""

    location: str
    """Config key, flag or file; "" if none."""
    reason: str
    """What is wrong, and what to do about it unless `advice` says that."""
    advice: str = ""
    """What to do, for callers that show it apart from the reason."""
    source: str = ""
    """Config file that sets the key; "" for the command line."""
    others: tuple[str, ...] = ()
    """Config keys whose values conflict with this one."""

    @property
    def message(self) -> str:
        """Reason and advice as one sentence."""
        return f"{self.reason}; {self.advice}" if self.advice else self.reason

    @property
    def label(self) -> str:
        """Location, with the config file that sets it."""
        return f"{self.location} (in {self.source})" if self.source else self.location

    def __str__(self) -> str:
        return f"{self.label}: {self.message}" if self.location else self.message


class UsageError(Exception):
    """The request of the user is invalid or impossible. Contains all problems; leads to exit code 2."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = list(problems)

    @classmethod
    def one(cls, location: str, reason: str, advice: str = "") -> UsageError:
        """Return an error with a single problem."""
        return cls([Problem(location, reason, advice)])


@contextmanager
def collect_problems(problems: list[Problem]) -> Iterator[None]:
    """Context manager that adds the problems of a UsageError to `problems` instead of raising it."""
    try:
        yield
    except UsageError as error:
        problems += error.problems


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` with the known word closest to a misspelled one, or ""."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def not_installed(library: str) -> str:
    """Return the message for a missing optional library."""
    return f"{library} is not installed: pip install {library}"
