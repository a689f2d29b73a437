"""Query language of run lists: conditions on names, states, metrics, config keys and labels; columns and sort order.

A query is words separated by blanks, and all of them must hold: `optim.name=adamw val_accuracy>0.9 -tag=old failed`.
`gputrain runs` and the screen of runs share it. `engine.runs.fields` resolves the names.

A key with other characters than letters, digits and `_ . / @ : -` is in double quotes, `"val f1">0.9`
(`engine.runs.keys`). A text with an operator is searched for with `note~"a > b"`.

`=` and `!=` take `*` and `?` in text, and several values, `model=resnet18,resnet50`. Text compares without regard to
case. A run whose value is unknown meets no condition on it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from typing import Any

from engine.base.errors import Problem, UsageError, collect_problems, did_you_mean
from engine.base.units import format_date
from engine.config.run_name import normalize_name
from engine.runs.fields import NO_NAMES, Field, FieldKind, Names, as_text, find_field
from engine.runs.folder import RunState
from engine.runs.keys import KEY_PATTERN, parse_key, quote_key, split_unquoted, unquote
from engine.runs.run_config import default_values
from engine.runs.run_row import RunRow

QUERY_HELP = (
    "Words that must all match: text in name, state, tags or note, or KEY=VALUE, with = != > >= < <= or ~ (contains) "
    "and * in values. -WORD excludes."
)
_OPERATOR = r"(?P<operator>!=|!~|>=|<=|==|=|>|<|~)(?P<value>.*)"
_CONDITION = re.compile(rf"(?P<key>{KEY_PATTERN}){_OPERATOR}", re.DOTALL)
_UNQUOTED_CONDITION = re.compile(rf"\s*(?P<key>[^\s=<>~!].*?)\s*{_OPERATOR}", re.DOTALL)
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
Predicate = Callable[[RunRow], bool]


@dataclass(frozen=True)
class Query:
    """A parsed query. `text` is what was typed."""

    text: str
    words: tuple[str, ...]
    predicates: tuple[Predicate, ...]
    """The condition of each word."""
    fields: frozenset[str] = frozenset()
    """Names of the fields with a condition. With `archived`, archived runs are listed, and with `sweep`, its trials one
    by one. With `age`, the runs that match change with time."""

    def matches(self, row: RunRow) -> bool:
        """Whether a run meets all conditions."""
        return all(predicate(row) for predicate in self.predicates)

    def filter(self, rows: Iterable[RunRow]) -> list[RunRow]:
        """Return the rows that match, in their order."""
        if not self.predicates:
            return list(rows)
        return [row for row in rows if self.matches(row)]


def parse_query(words: str | Sequence[str], names: Names = NO_NAMES) -> Query:
    """Parse a query: one text, or words of a command line, each of which may contain several conditions.

    Quotes keep blanks together. Raises UsageError with all invalid conditions.
    """
    texts = [words] if isinstance(words, str) else words
    predicates, problems, keys = list[Predicate](), list[Problem](), set[str]()
    parts = [part for text in texts for part in _split(text)]
    for word in parts:
        with collect_problems(problems):
            predicate, field = _parse_word(word, names)
            predicates.append(predicate)
            keys |= {field.name} if field is not None else set()
    if problems:
        raise UsageError(problems)
    return Query(" ".join(texts), tuple(parts), tuple(predicates), frozenset(keys))


def condition_keys(text: str) -> list[str]:
    """Return the keys that a query has conditions on. Raises UsageError as `parse_query` does."""
    return [key for word in _split(text) if (key := _parts_of(word)[1])]


def _split(text: str) -> list[str]:
    """Split at blanks outside of quotes. An open quote, as while typing, counts as text."""
    parts = split_unquoted(text, str.isspace, "\"'")
    return text.split() if parts is None else parts


def _parse_word(word: str, names: Names) -> tuple[Predicate, Field | None]:
    """Return the condition of a word, and the field it is on. Raises UsageError."""
    sign, key, comparison, value = _parts_of(word)
    if key:
        field = find_field(key, names)
        predicate = _parse_condition(field, comparison, value)
    else:
        predicate, field = _parse_plain(value), None
    if not sign:
        return predicate, field
    return (lambda row: not predicate(row)), field


def _parts_of(word: str) -> tuple[str, str, str, str]:
    """Return the sign of negation, the key, the operator and the value of a word; of one that is no condition, the text
    as its value.

    Raises UsageError for a condition whose key lacks quotes.
    """
    sign = word[0] if len(word) > 1 and word[0] in "-!" else ""
    body = word.removeprefix(sign)
    # A name has one form, however it is typed.
    if (match := _CONDITION.fullmatch(body)) is not None:
        return sign, parse_key(match["key"]), match["operator"], normalize_name(unquote(match["value"]))
    body = normalize_name(unquote(body))
    if (match := _CONDITION.fullmatch(body)) is not None:
        return sign, parse_key(match["key"]), match["operator"], match["value"]
    if (match := _UNQUOTED_CONDITION.fullmatch(body)) is not None:
        value = match["value"].strip()
        shown = quote_key(value) if len(value.split()) > 1 else value
        right = f"{sign}{quote_key(match['key'])}{match['operator']}{shown}"
        raise UsageError.one(word, "needs quotes around the key alone", f"write {right}", code="invalid-value")
    return sign, "", "", body


def _parse_plain(word: str) -> Predicate:
    """Return the condition of a word without operator: it is a state, or part of the name, the note or a tag."""
    text = word.casefold()
    if text in set(RunState):
        # `stopped` must not find a run that is called stopped-early.
        return lambda row: row.state == text
    if _has_wildcard(text):
        is_found = re.compile(translate(f"*{text}*")).match
        return lambda row: any(is_found(part.casefold()) for part in (row.name, row.shown_state, row.note, *row.tags))
    return lambda row: (
        text in row.name.casefold()
        or text in row.shown_state
        or (row.note != "" and text in row.note.casefold())
        or any(text in tag.casefold() for tag in row.tags)
    )


def _parse_condition(field: Field, sign: str, text: str) -> Predicate:
    if not text:
        condition = f"{quote_key(field.name)}{sign}"
        raise UsageError.one(condition, f"needs a value: {condition}VALUE", code="missing-value")
    if sign in ("~", "!~"):
        part = text.casefold()
        return _on_values(field, lambda value: part in _shown(field, value).casefold(), negated=sign == "!~")
    if sign in _COMPARISONS:
        if field.kind in (FieldKind.TAGS, FieldKind.FLAG):
            raise UsageError.one(
                f"{field.name}{sign}{text}", f"{field.name} has no order; use = or !=", code="not-supported"
            )
        compare, operand = _COMPARISONS[sign], parse_operand(field, text)
        if field.kind is FieldKind.CONFIG and operand.number is None and _is_numeric(field):
            raise UsageError.one(field.name, f"{text} is not {_FORMS[FieldKind.NUMBER]}", code="invalid-value")
        return _on_values(
            field, lambda value: _compares(compare, _comparable(field, value, operand), operand), negated=False
        )
    operands = [parse_operand(field, part, is_equality=True) for part in _alternatives(field, text)]
    return _on_values(
        field,
        lambda value: any(_equals(_comparable(field, value, item), item) for item in operands),
        negated=sign == "!=",
    )


def _is_numeric(field: Field) -> bool:
    """Whether a config key is a number by its default."""
    default = default_values().get(field.name)
    return isinstance(default, int | float) and not isinstance(default, bool)


def _alternatives(field: Field, text: str) -> list[str]:
    """Return the values of `model=resnet18,resnet50`. The value of a config key may have commas: `device.gpus=0,2`."""
    parts = [part for part in text.split(",") if part]
    if len(parts) < 2:
        return [text]
    return [*parts, text] if field.kind in (FieldKind.CONFIG, FieldKind.PARAMETER) else parts


def _on_values(field: Field, check: Callable[[Any], bool], *, negated: bool) -> Predicate:
    """Return a condition on the value of a field. An unknown value meets none, not even a negated one."""
    # Thousands of runs have the same few texts.
    check_text = lru_cache(maxsize=1024)(check)
    if field.name == "state":
        # A run that is shown as `diverged` has finished, too.
        return lambda row: (check_text(row.state) or check_text(row.shown_state)) is not negated

    def matches(row: RunRow) -> bool:
        value = field.value(row)
        if type(value) is str:
            return check_text(value) is not negated
        if field.kind is FieldKind.TAGS:
            return any(map(check, value)) is not negated
        return value is not None and check(value) is not negated

    return matches


def _comparable(field: Field, value: Any, operand: Operand) -> Any:
    """Return a value as it compares with an operand: a date as text, of a day without its minutes. With `90%`, programs
    that print percentages have 84.0 for 84%."""
    if field.kind is FieldKind.DATE:
        shown = _shown(field, value)
        return shown if _has_wildcard(operand.text) else shown[: len(operand.text)]
    is_percentage = operand.text.endswith("%") and isinstance(value, int | float) and abs(value) > 1
    return value / 100 if is_percentage else value


def _compares(compare: Callable[[Any, Any], bool], value: Any, operand: Operand) -> bool:
    """Compare numbers as numbers and text as text. A number and a text have no order."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int | float):
        return operand.number is not None and compare(value, operand.number)
    return isinstance(value, str) and operand.number is None and compare(value.casefold(), operand.text)


def _equals(value: Any, operand: Operand) -> bool:
    if operand.number is not None and isinstance(value, int | float) and not isinstance(value, bool):
        # 0.1 + 0.2 is shown as 0.3.
        return math.isclose(value, operand.number, rel_tol=1e-9, abs_tol=0.0)
    shown = as_text(value).casefold()
    return fnmatchcase(shown, operand.text) if _has_wildcard(operand.text) else shown == operand.text


def _shown(field: Field, value: Any) -> str:
    return format_date(value).replace(" ", "T") if field.kind is FieldKind.DATE else as_text(value)


def _has_wildcard(text: str) -> bool:
    return "*" in text or "?" in text


@dataclass(frozen=True)
class Operand:
    """A value in a condition: its text in lower case, and the number that it stands for, if any."""

    text: str
    number: float | None = None


_NUMBER = re.compile(r"([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?)(%|k|m|g)?")
_NUMBER_UNITS = {None: 1.0, "%": 0.01, "k": 1e3, "m": 1e6, "g": 1e9}
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:w|d|h|min|m|s|))+")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(w|d|h|min|m|s|)")
_DURATION_UNITS = {"w": 604_800.0, "d": 86_400.0, "h": 3600.0, "min": 60.0, "m": 60.0, "s": 1.0, "": 1.0}
_DATE = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])(-(0[1-9]|[12][0-9]|3[01])([t ]([01][0-9]|2[0-3])(:[0-5][0-9])?)?)?")
_FLAGS = {"yes": "true", "true": "true", "1": "true", "no": "false", "false": "false", "0": "false"}
_FORMS = {
    FieldKind.NUMBER: "a number, such as 0.9, 90% or 10k",
    FieldKind.SHARE: "a number, such as 0.9 or 90%",
    FieldKind.DURATION: "a duration, such as 90s, 5min, 1h30m or 2d",
    FieldKind.DATE: "a date, such as 2026-11-01 or 2026-11-01T14:30",
    FieldKind.FLAG: "yes or no",
}


def parse_operand(field: Field, text: str, *, is_equality: bool = False) -> Operand:
    """Parse a value of a condition. Raises UsageError if the field never has such a value."""
    folded = text.casefold()
    if is_equality and _has_wildcard(folded):
        return Operand(folded)
    operand = _PARSERS.get(field.kind, Operand)(folded)
    if operand is None:
        raise UsageError.one(field.name, f"{text} is not {_FORMS[field.kind]}", code="invalid-value")
    if field.choices and is_equality and folded not in field.choices:
        reason = f"{text} is no {field.name} of a run: {', '.join(field.choices)}{did_you_mean(folded, field.choices)}"
        raise UsageError.one(field.name, reason, code="unknown-value")
    return operand


def _as_number(text: str) -> Operand | None:
    match = _NUMBER.fullmatch(text)
    number = float(match[1]) * _NUMBER_UNITS[match[2]] if match is not None else math.nan
    return Operand(text, number) if math.isfinite(number) else None


def _as_duration(text: str) -> Operand | None:
    if _DURATION.fullmatch(text) is None:
        return None
    seconds = sum(float(count) * _DURATION_UNITS[unit] for count, unit in _DURATION_PART.findall(text))
    return Operand(text, seconds) if math.isfinite(seconds) else None


def parse_duration(option: str, text: str) -> float:
    """Return the seconds of a duration such as 90s, 5min, 1h30m or 2d. Raises UsageError, which names the option."""
    operand = _as_duration(text.casefold())
    if operand is None or operand.number is None:
        raise UsageError.one(option, f"{text} is not {_FORMS[FieldKind.DURATION]}", code="invalid-value")
    return operand.number


_PARSERS: Mapping[FieldKind, Callable[[str], Operand | None]] = {
    FieldKind.NUMBER: _as_number,
    FieldKind.SHARE: _as_number,
    FieldKind.CONFIG: lambda text: _as_number(text) or Operand(text),
    FieldKind.PARAMETER: lambda text: _as_number(text) or Operand(text),
    FieldKind.DURATION: _as_duration,
    FieldKind.DATE: lambda text: Operand(text.replace(" ", "t")) if _DATE.fullmatch(text) else None,
    FieldKind.FLAG: lambda text: Operand(_FLAGS[text]) if text in _FLAGS else None,
}
"""How each kind reads a value in lower case; others are text."""


def parse_columns(text: str, names: Names = NO_NAMES) -> list[Field]:
    """Return the fields of comma-separated keys. Raises UsageError with a problem for each unknown one."""
    fields, problems = list[Field](), list[Problem]()
    parts = split_unquoted(text, ",".__contains__, '"')
    for part in filter(str.strip, text.split(",")) if parts is None else parts:
        with collect_problems(problems):
            fields.append(find_field(parse_key(part.strip()), names))
    if problems:
        raise UsageError(problems)
    if not fields:
        raise UsageError.one("columns", "names no column, such as name,state,lr", code="missing-value")
    return list({field.name: field for field in fields}.values())
