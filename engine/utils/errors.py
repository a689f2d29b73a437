"""What is wrong with what a person asked for, said so that they can put it right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `location` is a config key, a flag or a file; `source` is the file that sets the key.
    `advice` says what to do where a caller shows it apart from the `reason`. `others` are the keys whose values rule
    this one out."""

    location: str
    reason: str
    advice: str = ""
    source: str = ""
    others: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """The reason, with the advice."""
        return f"{self.reason}; {self.advice}" if self.advice else self.reason

    @property
    def label(self) -> str:
        """The key, with the file that sets it."""
        return f"{self.location} (in {self.source})" if self.source else self.location

    def __str__(self) -> str:
        return f"{self.label}: {self.message}" if self.location else self.message


class UsageError(Exception):
    """Something that was asked for cannot be done; holds every problem that was found. Ends in exit code 2."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = list(problems)

    @classmethod
    def one(cls, location: str, reason: str, advice: str = "") -> UsageError:
        return cls([Problem(location, reason, advice)])


@contextmanager
def collect_problems(problems: list[Problem]) -> Iterator[None]:
    """What is found wrong within is added to `problems`, and not raised."""
    try:
        yield
    except UsageError as error:
        problems += error.problems


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known word that is most like this one, or nothing."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


def not_installed(library: str) -> str:
    return f"{library} is not installed: pip install {library}"
