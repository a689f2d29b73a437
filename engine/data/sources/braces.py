"""Expand brace patterns such as `train-{000..146}.tar` and `{train,extra}-0.tar`, as WebDataset and bash do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from engine.utils.errors import CodedError

# Each level is a recursion, and multiplies the names.
MAX_BRACES = 16
_RANGE = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?")


def expand_braces(pattern: str, max_names: int) -> list[str]:
    """Return the names that a pattern stands for, in its order. Raises CodedError if they are more than `max_names`."""
    if pattern.count("{") > MAX_BRACES:
        raise CodedError(f"has more than {MAX_BRACES} braces", code="too-many")
    names = list(islice(_expand(pattern), max_names + 1))
    if len(names) > max_names:
        raise CodedError(f"stands for more than {max_names:,} files", code="too-many")
    return names


def _expand(pattern: str) -> Iterator[str]:
    begin = pattern.find("{")
    while begin >= 0:
        end, commas = _matching_brace(pattern, begin)
        if end is None:
            break
        choices = _choices(pattern[begin + 1 : end], [comma - begin - 1 for comma in commas])
        if choices is not None:
            for choice in choices:
                for tail in _expand(pattern[end + 1 :]):
                    yield pattern[:begin] + choice + tail
            return
        # Braces around a single name are part of the name.
        begin = pattern.find("{", begin + 1)
    yield pattern


def _matching_brace(pattern: str, begin: int) -> tuple[int | None, list[int]]:
    """Return the position of the brace that closes the one at `begin`, and of the commas directly between the two."""
    depth, commas = 0, list[int]()
    for position in range(begin, len(pattern)):
        character = pattern[position]
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position, commas
        if depth == 1 and character == ",":
            commas.append(position)
    return None, []


def _choices(content: str, commas: list[int]) -> Iterator[str] | None:
    """Return what stands between two braces: a list, a range of integers, or None for anything else."""
    if commas:
        ends = [*commas, len(content)]
        begins = [0, *(comma + 1 for comma in commas)]
        return (choice for begin, end in zip(begins, ends, strict=True) for choice in _expand(content[begin:end]))
    match = _RANGE.fullmatch(content)
    return _numbers(match[1], match[2], int(match[3] or 1)) if match is not None else None


def _numbers(first: str, last: str, step: int) -> Iterator[str]:
    """Yield the numbers of a range, with leading zeros if one of the two has them."""
    is_padded = any(len(number.lstrip("-")) > 1 and number.lstrip("-").startswith("0") for number in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    low, high, step = int(first), int(last), abs(step) or 1
    numbers = range(low, high + 1, step) if low <= high else range(low, high - 1, -step)
    return (f"{number:0{width}d}" for number in numbers)
