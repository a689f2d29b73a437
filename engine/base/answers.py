"""The answer to a request that can fail: of a helper process, or of rank 0 to the other ranks.

Modules that `engine.base.helper_process` starts send it, and `engine.train.distributed.messages`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from engine.base.codec import Record
from engine.base.errors import Problem, UsageError

T = TypeVar("T")


class Answer(Record, Generic[T], frozen=True):
    """A value, or None and the problems that prevent it."""

    value: T | None = None
    problems: tuple[Problem, ...] = ()

    def get(self) -> T:
        """Return the value. Raises UsageError if there is none."""
        if self.problems or self.value is None:
            raise UsageError(self.problems)
        return self.value

    @classmethod
    def of(cls, compute: Callable[[], T]) -> Answer[T]:
        """Return the answer with what a function returns, or with the problems of the UsageError that it raises."""
        try:
            return cls(compute())
        except UsageError as error:
            return cls.refuse(error)

    @classmethod
    def refuse(cls, error: UsageError) -> Answer[T]:
        """Return the answer with the problems of an error."""
        return cls(problems=tuple(error.problems))
