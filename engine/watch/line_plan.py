"""The plan of a shape of lines: what the numbers between its texts mean.

A line is a position (epoch, step) and pairs of a name and a number, with an optional unit or deviation. `line_metrics`
makes one plan for all lines of a shape.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Literal

from engine.watch.line_names import (
    LineNames,
    are_results,
    is_held_out,
    is_position,
    is_result,
    is_setting,
    is_source,
    is_weak_result,
    joined,
    may_be_metric,
    source_of,
    with_source,
)
from engine.watch.reading import SCALES

MAX_OTHER_WORDS = 3  # beside the names of metrics; a sentence has more
MAX_COUNTED_WORDS = 200
MAX_NAME_WORDS = 6
MAX_POSITIONS = 16  # steps of a line
MAX_POSITION_CHARS = 100  # before its number
MAX_LOOK_BACK = 4  # numbers before a position that may belong to its name
MAX_BARE_WORDS = 3  # of a name without a separator

# Neither are the values of options: `level=info`.
_WORDS = re.compile(r"[A-Za-z](?<![\w./?%<@'=\"-].)[A-Za-z]{2,}+(?!=)")
_STOP_WORDS = frozenset((
    "a", "an", "and", "after", "are", "as", "at", "by", "for", "from", "has", "in", "is", "of", "on", "or", "over",
    "than", "that", "the", "then", "this", "to", "was", "were", "with",
))  # fmt: skip
_JOINTS = frozenset({"after", "at", "end", "for", "in", "is", "of", "on", "over", "the"})

# Positions. In what the patterns read, `\0` stands for a number: the first one may be a position. A text begins with
# `\x01` if that is not the first one of the line.
_TO = r"\0(?:[kKM]|it)?[ ]{0,2}/[ ]{0,8}\0"
_NO_TEXT = r"(?!\.\w|[A-Za-z])"
_NAMED_EPOCH = re.compile(
    r"[^\0]*(?<![\w/.-])(?<!per )(?<!over )(?:epoch|ep(?:\.|(?=[^\w\0])))(?:\(\w{1,20}\))?[\s:=#\[(]{0,6}\0",
    re.IGNORECASE,
)
_EPOCH = re.compile(
    rf"{_NAMED_EPOCH.pattern}{_NO_TEXT}"
    # `1epoch:train: `, `1/3 * Epoch (train): `, `Train: 3 [ 100/ 400]`, `[3/10][10/100]`
    rf"|[^\0]*\0(?-i:epoch[: ])|[^\0\x01]*{_TO} \* (?-i:Epoch) |[^\w\0\x01]{{0,10}}train(?:ing)?:\s\0\s{{1,4}}\["
    rf"|[^\0]*\[{_TO}\]\s?\[\s{{0,8}}{_TO}",
    re.IGNORECASE,
)
# `[1,  2000] loss: 2.2`
_EPOCH_AND_BATCH = re.compile(r"\s*[\[(]\s*\0,\s*\0[\])]")
# Of a bar, too: `100% 235/235 [00:10<00:00`
_PERCENTAGE = re.compile(r"[^\0]*(?:\0%\||\(\0%|\0%[^\0]*\0/\0 \[)")
_TIME = re.compile(r"[^\0]*\0:\0(:\0)?")
# `[3] loss: 2.2`, `100: loss`, `Round 3 | loss`
_LEADING_COUNT = re.compile(
    r"\s*\[\s*\0\](?=[\s\0]|$)|\s*\0:(?!\d)"
    r"|[^\w\0]{0,10}(?!(?i:gpu|rank|worker|device|node|cuda|fold|layer|class|world|pid)\b)(?P<word>[^\W\d_]{2,15})"
    r"\s?[#:]?\s?\0\s?(?:[:|,\])]|-(?!\d))"
)
_EPOCH_WORD = re.compile("epoch", re.IGNORECASE)
_STEP = re.compile(
    r"(?<![\w/.-])(?<!per )(?P<name>(?:(?:global|train|training|current|env|learning|completed|gradient)[ _])?"
    r"(?:steps?|iterations?|iters?|itr?|updates?|upd?\.|batch|rounds?|episodes?|time_?steps?)"
    r"|num_updates|globalstep|total[ _]timesteps|num_env_steps|num_timesteps|current_steps|n_iter|training_iteration)"
    r"[\s:=#\[(]{0,8}$",
    re.IGNORECASE,
)
_BEHIND_POSITION = " \t:=#[("
# The ends of what the patterns find, which costs a tenth to know.
_POSITION_ENDS = (
    "epoch", "ep", "ep.", "step", "steps", "iteration", "iterations", "iter", "iters", "it", "itr", "update",
    "updates", "up.", "upd.", "batch", "round", "rounds", "episode", "episodes",
)  # fmt: skip
# `Val steps: 20` says how many there are.
_NUM_STEPS = re.compile(r"[A-Za-z]{2,12} steps\W{1,4}$", re.IGNORECASE)
_GLOBAL_STEPS = frozenset(
    {"global_step", "num_updates", "total_timesteps", "num_env_steps", "num_timesteps", "current_steps"}
)
# `Max accuracy: 72.1%` was there before.
_RECAP = re.compile(
    r"\W{0,8}(?:the )?(?:(?:current |overall )?best|highest|max(?:imum)?(?= (?:\w+ )?acc))\s", re.IGNORECASE
)
_SUMMARY = re.compile(r"\s{0,4}\*\s")

# What follows a number.
_NO_COUNT = re.compile(r"\.\w|[A-Za-z]")
_OF = re.compile(r"(?:[kKM]|it)?[ ]{0,2}/[ ]{0,8}$")
_UNITS = (
    r"(?:[mun]s|µs|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?|[KMGTkmgt]i?[Bb](?:ytes)?|[KMG](?![A-Za-z])"
    r"|it|[A-Za-z]{1,12}/\w{1,12}(?:/\w{1,12}){0,2}|/s(?:/\w{1,12})?|[GT]?FLOPS?|[GTP]F|x|W|°?C)(?![A-Za-z\d_])"
)
_UNIT = re.compile(
    rf"\s?%|[kKMGT](?![A-Za-z])|(?:{_UNITS}"
    # The words of a name may follow instead: `2.0 hours left=3`
    rf"|(?!\s\w{{1,12}}/\w{{1,12}}\s+$|\s\w{{1,20}}(?:\s\w{{1,20}})?\s?[:=])\s{_UNITS}(?!\s{{0,4}}[:=]))(?:\([\d.]{{1,8}}%\))?",
)
_RESULT_UNITS = frozenset({"", "%", " %", "k", "K", "M", "x"})
# What makes a number something else: a path, a version, a date, an operator of code.
_NO_NUMBER = re.compile(r"\w|, ['\"]|[/:+^=<>-](?=\w)|\.\w|[ \t]{0,4}[*^](?=\s?[A-Za-z_(])|\s{0,2}-{1,2}>")
_DEVIATIONS = frozenset({"+", "±", "+/-", "+-"})
_CONTINUATIONS = _DEVIATIONS | {"", "("}

# What is between a name and its number, from the end.
_OPENER = re.compile(r"[\[(]{0,2}(?:(?:\w{1,20}\.)?(?:tensor|float\d{1,3}|int\d{1,3}|Array)\()?$")
_SEPARATORS = " \t.:=->→"
_SEPARATOR = re.compile(r"\s*(?:[:=]|->|→|(?<!\.)\.{3,}+)\s*$|\s+is\s+$|\s-\s+$|\s+$")
# `(ms)`, ` in s`
_PARENTHESIS = re.compile(r"\s?\([\w/%., -]{1,24}\)$|\sin\s(?:[mun]?s|secs?|seconds|minutes|%)$")
# Up to the last of them
_HARD = re.compile(r".*(?:[,;|\[\]{}()<>\"]|  | -{1,2} |: )")
_HARD_START = re.compile(r"\s?(?:[,;|\](±]|\+/?-|  | -{1,2} |\.?\s?$)|\s:\s")
_NAME_WORD = r"(?:[A-Za-z_][A-Za-z0-9_@./%+'-]*+|[^\W\d]++)"
_NAME = re.compile(rf"{_NAME_WORD}(?: {_NAME_WORD})*")
# Most names, with what is around them
_PLAIN_NAME = re.compile(rf"((?:{_HARD.pattern}(?=\s?\S))?+)\s?({_NAME_WORD}(?: {_NAME_WORD})*+)(\s?[:=]\s?|\s)")
_SOURCE_FILE = re.compile(r"\.(?:py|c|cc|cpp|cu|h|go|jl|rs|js|ts|java|lua|R)$")
_LABEL = re.compile(r"(?:^|[\s|\[(])(\w{2,10})[:\])]{1,2}\s*$")
# `Test (EMA): `
_PART = re.compile(r"\b(?:test|val|validation|eval) \(([A-Za-z]{1,12})\): ?(?:$|\[)", re.IGNORECASE)
# `tot_loss[loss=3, `
_GROUP = re.compile(r"([A-Za-z][\w.]{0,40})\[$")
# `Loss (for one batch) at step 100: 3`, `Accuracy over epoch: 3`
_AT_POSITION = re.compile(
    r"\s(?:(?:at|after|for|in|on|over|end|of|the)\s){1,4}(?:(?!final|best)\w{1,20}\s)?(?:epoch|step|iteration|iter|batch|round)\s?$",
    re.IGNORECASE,
)
_INSERTION = re.compile(r"\s\([^()]{0,60}\)")


Context = Literal["", "record", "block"]
"""What lines before a line said: a step or an epoch, or it is in a block below such a heading and may have any name."""


Role = Literal["other", "position", "value", "more"]
"""What a number of a line is: a `position` is also a total, a percentage or a time, `more` a deviation, an average or a
further element of the value before it."""


@dataclass(frozen=True)
class StepNumber:
    """Which number of a shape is a step. `total` is the number of its total, -1 if it counts to no known one."""

    number: int
    total: int | None = None
    scale: float = 1.0
    name: str = ""
    """The word before it, such as `step`."""
    is_plural: bool = False
    """Whether the word is one of several steps, so that another position is to be preferred."""

    @property
    def is_fraction(self) -> bool:
        """Whether it is a position only if it is not above its total."""
        return not self.name and self.total is not None and self.total >= 0


@dataclass
class Plan:
    """What the numbers of a shape mean: `pairs` have name, number and scale, `ratios` name, number and the one behind
    a slash, and `averages` name and the number in parentheses behind a value. `steps` are in order of preference."""

    pairs: list[tuple[str, int, float]] = field(default_factory=list)
    ratios: list[tuple[str, int, int]] = field(default_factory=list)
    averages: list[tuple[str, int]] = field(default_factory=list)
    steps: list[StepNumber] = field(default_factory=list)
    epoch: int | None = None
    has_exact_epoch: bool = False
    """Whether the epoch is a value of an object, which may have a fraction."""
    rank: int | None = None
    source: str = ""
    held_out: bool = False
    is_training: bool = False
    is_accepted: bool = False
    """Whether lines of the shape have metrics."""
    may_be_learned: bool = False
    """Whether they have if they are regular: no name is known."""
    is_heading: bool = False
    """Whether a line says little else than a position, or what the next ones were measured on."""

    @property
    def has_axis(self) -> bool:
        """Whether lines of the shape have a position."""
        return bool(self.steps) or self.epoch is not None


def make_plan(texts: Sequence[str], context: Context = "") -> Plan:
    """Return what the numbers between the texts of a line mean."""
    return _PlanMaker(texts).make(context)


class _PlanMaker:
    def __init__(self, texts: Sequence[str]) -> None:
        self._count = len(texts) - 1
        # What follows a number, and what is before the next one without the unit of this one.
        self._right = texts[1:]
        self._units = [match[0] if (match := _UNIT.match(text)) else "" for text in self._right]
        self._left = [text[len(unit) :] for text, unit in zip(texts, ["", *self._units], strict=True)]
        self._roles: list[Role] = ["other"] * self._count
        self._plan, self._names = Plan(), LineNames()
        self._added: set[str] = set()
        self._results: list[str] = []
        """Names whose values have no unit of a reading."""
        self._others: list[str] = []
        """Text that belongs to no name."""
        self._label: str | None = None
        """That text before the first value."""
        self._heading = self._group = ""
        self._has_bar = any("%|" in text or "it/s" in text or "s/it" in text for text in texts)

    def make(self, context: Context) -> Plan:
        self._find_positions()
        for number in range(self._count):
            if self._roles[number] == "other":
                self._read_value(number)
            elif self._roles[number] == "position":
                # `Epoch(val)` says what the values were measured on.
                left = self._left[number]
                end = _EPOCH_WORD.sub("", _NUM_STEPS.sub("", left[-MAX_POSITION_CHARS:]))
                self._others.append(left[:-MAX_POSITION_CHARS] + _STEP.sub("", end))
        self._others.append(self._left[-1])
        others = " | ".join(self._others)
        source = source_of(others if self._label is None else self._label)
        if not source and self._left and _SUMMARY.match(self._left[0]):
            source = "test"
        if source and (match := _PART.search(others)) is not None:
            source += f"_{match[1]}"
        self._judge(others, source, context)
        return self._plan

    # Positions

    def _find_positions(self) -> None:
        ranked: list[tuple[int, StepNumber]] = []
        number = 0
        while number < self._count and len(ranked) < MAX_POSITIONS:
            number += self._read_position(number, ranked)
        # `Epoch 3 | Steps: 4` tells how many steps an epoch has.
        self._plan.steps = [
            position
            for _, position in sorted(ranked, key=itemgetter(0))
            if self._plan.epoch is None or not position.is_plural or position.total is not None
        ]

    def _read_position(self, number: int, ranked: list[tuple[int, StepNumber]]) -> int:
        """Take a number as a position, if it is one, and return how many numbers were read."""
        left, right = self._left[number][-MAX_POSITION_CHARS:], self._right[number]
        total = number + 1 if "/" in right and number + 1 < self._count and _OF.match(right) else None
        end = left.rstrip(_BEHIND_POSITION).lower()
        has_name = end.endswith(_POSITION_ENDS) or (end.endswith(")") and "ep" in end)
        if number and total is None and not has_name and right[:1] not in ("", ":", "%", "e", "i", "b"):
            return 1
        text = "\0".join([left, *self._right[number : number + 4]])
        text = f"\x01{text}" if number or len(left) == MAX_POSITION_CHARS else text
        length, scale = 2 if total is not None else 1, SCALES.get(right[:1], 1.0) if not right[1:2].isalpha() else 1.0
        step = _STEP.search(left) if has_name else None
        if number == 0 and _EPOCH_AND_BATCH.match(text):
            self._plan.epoch, length = 0, 2
            ranked.append((1, StepNumber(1)))
        elif (time := _TIME.match(text)) is not None and not (step or _NAMED_EPOCH.match(text)):
            length = 3 if time[1] else 2
        elif _PERCENTAGE.match(text):
            length = 1
        elif self._plan.epoch is None and _EPOCH.match(text):
            self._plan.epoch = number
        elif step is not None and (scale > 1 or not _NO_COUNT.match(right)):
            name = step["name"].lower().replace(" ", "_")
            is_plural = name.endswith("steps") and name not in _GLOBAL_STEPS
            counts_to = -1 if total is None and name == "batch" else total
            position = StepNumber(number, counts_to, scale, name, is_plural)
            ranked.append((0 if name in _GLOBAL_STEPS else 1 + is_plural, position))
        elif total is not None and self._right[total].startswith(" correct"):
            return length
        elif total is not None and (self._is_free(left) or self._right[total].startswith((" [", "it ["))):
            ranked.append((1 if left.endswith("[") else 2, StepNumber(number, total, scale)))
        elif right.startswith(("it [", "batch:")):
            ranked.append((2, StepNumber(number, -1)))
        elif number == 0 and (count := _LEADING_COUNT.match(text)) is not None and not is_result(count["word"] or ""):
            ranked.append((2 if left.strip() == "[" else 3, StepNumber(number)))
        else:
            return 1
        self._roles[number : number + length] = ["position"] * length
        return length

    def _is_free(self, left: str) -> bool:
        """Whether a fraction is no value of a name, and not in parentheses behind one."""
        before = left.rstrip()
        if before.endswith((":", "=")):
            return not _NAME.fullmatch(re.split(r"[\s,;|\[\](){}]", before[:-1].rstrip())[-1])
        return not before.endswith(("(", "-", "/")) and (
            left != before or not (before[-1:].isalpha() or before[-1:] == ".")
        )

    # Pairs

    def _read_value(self, number: int) -> None:
        left, right = self._left[number], self._right[number]
        if number and self._roles[number - 1] in ("value", "more") and left.strip(" [,") in _CONTINUATIONS:
            self._roles[number] = "more"
            if left.strip() == "(" and self._roles[number - 1] == "value" and self._plan.pairs:
                self._plan.averages.append((self._plan.pairs[-1][0], number))
            return
        if number and self._roles[number - 1] == "position" and left.strip() in (":", "="):
            # `Loss (for one batch) at step 100: 3`
            before = "".join(self._left[max(number - MAX_LOOK_BACK, 0) : number])
            text, matched = _AT_POSITION.subn("", _INSERTION.sub("", before))
            if matched:
                self._others.clear()
                left = text + left
        words, is_explicit, rest = _find_name(left)
        if "]" in rest:
            self._group = ""
        self._others.append(rest)
        is_value = self._units[number] or not _NO_NUMBER.match(right) or right in _DEVIATIONS or _OF.match(right)
        if len(words) == 1 and words[0].lower() == "rank":
            self._plan.rank = number
            return
        if not words or not is_value or not (is_explicit or self._is_bare_pair(words, rest, number)):
            self._others.append(" ".join(words))
            return
        if rest and rest.rstrip().endswith((":", ")", "]")) and (match := _LABEL.search(rest)) is not None:
            self._heading = source_of(match[1]) or self._heading
        if rest.endswith("[") and (match := _GROUP.search(rest)) is not None:
            self._group = match[1]
        if len(words) == 1 and is_source(words[0]) and self._plan.pairs and not self._heading:
            # `loss train: 2, val: 3`
            before = self._plan.pairs[-1][0]
            base = "_".join(word for word in re.split(r"[_/ ]", before) if not is_source(word))
            words = [words[0], base] if base not in ("", before) else words
        self._label = self._label if self._label is not None else " | ".join(self._others)
        self._roles[number] = "value"
        name = self._names.add(words, self._heading, self._group)
        if name not in self._added and not (is_position(name) or ("." in name and _SOURCE_FILE.search(name))):
            self._added.add(name)
            self._add(name, number)

    def _add(self, name: str, number: int) -> None:
        if self._units[number] in _RESULT_UNITS:
            self._results.append(name)
        is_share = "/" in self._right[number] and number + 1 < self._count and _OF.match(self._right[number])
        if is_share and self._roles[number + 1] == "other":
            self._roles[number + 1] = "more"
            if is_result(name) or (self._right[number] == " / " and not self._units[number + 1]):
                self._plan.ratios.append((name, number, number + 1))
        else:
            self._plan.pairs.append((name, number, SCALES.get(self._units[number], 1.0)))

    def _is_bare_pair(self, words: Sequence[str], rest: str, number: int) -> bool:
        """Whether words and a number behind a blank are a pair: in prose, they are not."""
        name = joined(words)
        if len(words) <= MAX_BARE_WORDS and (is_result(name) or is_weak_result(name)):
            return True
        if len(words) > 1:
            return False
        if not rest.strip() and number and self._roles[number - 1] in ("value", "more"):
            return True
        is_whole = _HARD_START.match(self._left[number + 1]) is not None
        label = rest.rstrip(" ")
        is_first = not rest or rest[-2:] == "  " or label.endswith((",", ";", "|", ")", "]", ":"))
        return is_first and (is_whole or label.endswith(":"))

    # Judgment

    def _judge(self, others: str, source: str, context: Context) -> None:
        """Decide whether the line has metrics, or is a heading."""
        plan, names = self._plan, self._results
        num_others = sum(not is_source(word) for word in _WORDS.findall(others)[:MAX_COUNTED_WORDS])
        is_terse = self._has_bar or num_others <= max(MAX_OTHER_WORDS, len(plan.pairs))
        if names and is_terse:
            has_axis = plan.has_axis or context != ""
            is_in_block = context == "block" and not num_others and not plan.has_axis
            is_recap = not plan.has_axis and _RECAP.match(self._left[0]) is not None
            is_known = is_in_block or are_results(names, has_axis=has_axis, has_source=bool(source))
            plan.is_accepted = is_known and not is_recap
            is_regular = plan.has_axis or (len(plan.pairs) > 1 and not num_others and self._label == "")
            plan.may_be_learned = is_regular and not self._has_bar and not any(map(is_setting, names))
        plan.source, plan.is_training = "" if source == "train" else source, source == "train"
        plan.pairs = [(with_source(name, plan.source), number, scale) for name, number, scale in plan.pairs]
        plan.ratios = [(with_source(name, plan.source), number, total) for name, number, total in plan.ratios]
        plan.averages = [(with_source(name, plan.source), number) for name, number in plan.averages]
        results = [name for name in names if is_result(name) or is_weak_result(name)]
        plan.held_out = bool(plan.source) or (bool(results) and all(map(is_held_out, results)))
        has_named_position = plan.epoch is not None or any(position.name for position in plan.steps)
        plan.is_heading = is_terse and not self._has_bar and (has_named_position or bool(source))


# The shapes of a program have many texts in common.
@lru_cache(maxsize=2048)
def _find_name(left: str) -> tuple[list[str], bool, str]:
    """Return the words of the name that ends a text, whether a separator follows it, and the rest of the text."""
    plain = _PLAIN_NAME.fullmatch(left)
    if plain is not None and "..." not in left and _JOINTS.isdisjoint((lowered := plain[2].lower().split())[-8:]):
        # All that follows comes to the same, in three times the time.
        stops = (
            () if _STOP_WORDS.isdisjoint(lowered) else (i for i, word in enumerate(lowered, 1) if word in _STOP_WORDS)
        )
        words, begin = plain[2].split(), max(len(lowered) - MAX_NAME_WORDS, 0, *stops)
        return words[begin:], not plain[3].isspace(), plain[1] + " ".join(words[:begin])
    opener = _OPENER.search(left) if left.endswith(("(", "[")) else None
    text = left[: opener.start()] if opener is not None else left
    # A search from the beginning of a text takes three times as long.
    separator = _SEPARATOR.search(text, max(len(text.rstrip(_SEPARATORS)) - len(" is"), 0))
    if separator is None:
        return [], False, left
    # `accuracy: 0.9 - 3s`
    named, is_explicit = text[: separator.start()], separator[0].strip() not in ("", "-")
    parenthesis = _PARENTHESIS.search(named) if named.endswith(")") or " in " in named else None
    if parenthesis is not None and (is_explicit or may_be_metric(named[: parenthesis.start()] + "0")):
        named = named[: parenthesis.start()]
    if is_explicit and named.lower().rstrip().endswith(_POSITION_ENDS):
        named = _AT_POSITION.sub("", named)
    hard = _HARD.match(named)
    begin = hard.end() if hard is not None else 0
    words = named[begin:].split()
    first, least = len(words), max(len(words) - MAX_NAME_WORDS, 0)
    while first > least and _NAME.fullmatch(words[first - 1]):
        # `Std of reward` is one name.
        is_joint = words[first - 1] == "of" and 1 < first < len(words) and words[first - 2].lower() not in _STOP_WORDS
        if not is_joint and words[first - 1].lower() in _STOP_WORDS:
            break
        first -= 1
    return words[first:], is_explicit, named[:begin] + " ".join(words[:first])
