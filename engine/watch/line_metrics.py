"""Find the values of metrics in one line of the output of a training, and where on the x axes they are.

Lines of a program have few shapes: a shape is the text between the numbers. `line_plan` says once what the numbers of a
shape mean, and `LineParser` reads them. `output_metrics` calls it, and knows what earlier lines said.

A guess is conservative: a line counts only if one of its names is that of a result, such as a loss or an accuracy, and
if little other text is in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from typing import Literal, NamedTuple

from engine.watch.line_names import (
    MAX_LINE_CHARS,
    SPLIT_NAMES,
    are_results,
    has_known_word,
    is_held_out,
    is_position,
    is_result,
    may_be_metric,
    source_of,
    with_source,
)
from engine.watch.line_plan import MAX_OTHER_WORDS, Context, Plan, StepNumber, make_plan
from engine.watch.line_prefix import strip_prefix
from engine.watch.reading import (
    MAX_STEP,
    THOUSANDS,
    Columns,
    flat_numbers,
    parse_json_object,
    parse_number,
    to_epoch,
    to_step,
)

MAX_LINE_LENGTH = 4000
MAX_NUMBERS, MAX_FREE_NUMBERS = 110, 50
"""Nothing is read of a line with more characters or numbers, or with more than `MAX_FREE_NUMBERS` that are not all
`name=number`. Of an object, the first `MAX_NUMBERS` are read. So a new shape takes a millisecond at most."""
MAX_TEXT_LENGTH = 400  # before a number; it is prose
MAX_OBJECTS = 20  # of a line
MAX_PLANS, MAX_FORMS = 2048, 4096
MAX_FORM_LENGTH, MAX_PLANS_OF_FORM = 1000, 64

# The first character comes first, so that `re` skips all others at once, and the most frequent form behind it. `\d`
# takes a fifth longer than `[0-9]`.
_NUMBER = re.compile(
    r"([-+.0-9nNiI](?<![\w@.].)(?<!\w-.)(?:(?<![-+])|(?<=[-+])[.0-9nNiI])(?>"
    r"(?<=[0-9])(?:[0-9]*+(?:\.[0-9]++)?(?![.eE]|,[0-9])"
    r"|[0-9]{0,2}(?:,[0-9]{3}){1,6}+(?![0-9,])(?:\.[0-9]++)?|(?<![0-9],[0-9])[0-9]*+,[0-9]++(?![0-9,.])"
    r"|(?<=1)\.\#(?i:QNAN|SNAN|IND|INF)\w*+|[0-9]*+(?:\.[0-9]*+)?(?:[eE][-+]?[0-9]++)?)"
    r"|(?<=\.)[0-9]++(?:[eE][-+]?[0-9]++)?"
    r"|(?<=[nN])(?i:an)(?:\(\w{1,8}\))?(?![A-Za-z_])|(?<=[iI])(?i:nf(?:inity)?)(?![A-Za-z_])"
    r"))(?!\.[0-9])"
)
_BLANKS = re.compile(r"[ \t]{2,}|\t")
# `100%|███   | ` of tqdm, `━━━━` of Rich and Keras
_BAR = re.compile(r"%\|[^|]{0,200}\||%?\s?[━╸╺─█▏▎▍▌▋▊▉]{2,}")
# Fullwidth punctuation, and the lines of boxes
_NORMAL = dict(zip("：，；＝｜（）│┃\u00a0", ":,;=|()|| ", strict=True))
_NO_METRICS = re.compile(
    r"\s{0,20}(?:wandb:|Traceback|File \"|[\w.]{0,120}(?:Error|Exception|Warning|Interrupt)\b(?! ?:? ?$)|[+$>] "
    r"|# (?!\w{1,20}: )|https?:)"
)
# `Epoch1/300|Iter10`: a program that prints such a position prints all so.
_GLUED = re.compile(
    r"[hprHPR](?=\d)(?i:" + "|".join(rf"(?<=(?<![\w/.-]){word})" for word in ("epoch", "iter", "step", "batch")) + ")"
)
# What is written another way before a line is read, if it has a part
_REWRITTEN = [
    (part, re.compile(pattern), replacement)
    for part, pattern, replacement in (
        # `OrderedDict([('loss', 3), `
        ("[('", r"\('(\w{1,60})', (?=[-+\d.ni])", r"\1="),
        # `LR (group 0)=3`
        (")=", r" \((group|layer|class|head|expert|stage) (\d{1,6})\)(?==)", r"_\1_\2"),
        # `D(G(z)): 3`, `D(x): 3`
        ("))", r"([A-Z])(?<!\w.)\((\w{1,8})\((\w{1,8})\)\)(?=\s?[:=])", r"\1_\2_\3"),
        (")", r"([A-Z])(?<!\w.)\((\w{1,8})\)(?=\s?[:=])", r"\1_\2"),
        # `第1轮`, `第 100 步`
        ("第", r"第\s?(\d{1,12})\s?[轮期][:：,，]?\s?", r"epoch \1 "),
        ("第", r"第\s?(\d{1,12})\s?[步次][:：,，]?\s?", r"step \1 "),
        # `Batch [0-100]`, `1-100batch`
        ("atch", r"(?<=[\[:])\d{1,12}-(?=\d{1,12}(?:\]|batch\b))", ""),
    )
]
# COCO: ` Average Precision  (AP) @[ IoU=0.50 | area= all ] = 0.6`, below `IoU metric: bbox`
_QUALIFIED = re.compile(
    r"\s{0,8}(?P<name>[A-Za-z][\w ()-]{1,60}@?\[[^\[\]]{1,100}\]) = (?P<value>[-+]?(?:\d{1,20}(?:\.\d{1,20})?|nan))\s?"
)
_HEADING = re.compile(r"[A-Za-z][\w -]{1,40}: ?(\w{1,20})\s?")
# Without any of them, a line has a known word, or says nothing.
_SIGNS = re.compile(
    r"[:=|\[({→：＝｜（│┃━╸╺─█▏▎▍▌▋▊▉]|->|\.\.\.| is |^\W{0,40}(?i:train|val|test|eval)[a-zA-Z]{0,6}\W{0,40}$"
)
_WORDS = re.compile(r"(?<![\w./?%<@'-])[A-Za-z]{3,}+")
_SAME_DIGIT = bytes.maketrans(b"123456789", b"000000000")
_DIGITS = re.compile("[0-9]+")


class Candidate(NamedTuple):
    """What makes lines of unknown names metrics: a `counter` that grows, which is a position if it `is_position`."""

    names: str
    counter: tuple[float, float]
    is_position: bool


@dataclass(slots=True)
class ParsedLine:
    """The values of a line, and where on the x axes they are as far as the line says so.

    `total` is the number of steps after which the counter of `step` starts again, None if it counts on. `held_out`
    tells that the values were measured on other data than that of the training, and `has_exact_epoch` that the epoch is
    a value of an object, which may have a fraction. `source` is the word outside of names that says what the values
    were measured on, and `is_training` tells that it says training. `step_name` is the word before the step, such as
    `iteration`. `averages` are the numbers in parentheses behind values. `candidate` is set if all names are unknown.
    `rank` is the one that the line names. Without values, the line is a heading.
    """

    values: dict[str, float] = field(default_factory=dict)
    step: int | None = None
    total: int | None = None
    epoch: float | None = None
    held_out: bool = False
    has_exact_epoch: bool = False
    source: str = field(default="", compare=False)
    averages: dict[str, float] = field(default_factory=dict, compare=False)
    step_name: str = field(default="", compare=False)
    candidate: Candidate | None = field(default=None, compare=False)
    is_training: bool = field(default=False, compare=False)
    rank: int | None = field(default=None, compare=False)


class _Form(NamedTuple):
    """Lines that differ in digits only: their numbers are at the same places. `fields` returns the numbers of a line,
    then the digits in its texts, which decide between the `plans`."""

    fields: Callable[[str], tuple[str, ...]]
    num_numbers: int
    plans: dict[tuple[str, ...], Plan]


class LineParser:
    """Parses the lines of one program."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str, Context | Literal["axis", "object"]], Plan] = {}
        """Where a shape has a position, earlier lines do not matter."""
        self._learned: set[str] = set()
        self._has_decimal_commas = self._has_glued = False
        self._previous = self._group = ""
        """The line before this one, and the word that is the group of the qualified names below it."""
        self._forms: dict[tuple[bytes, Hashable], _Form | None] = {}
        """By the line with `0` for all digits. None if there was one such line so far."""
        self._key: tuple[bytes, Hashable] = (b"", "")
        self._latest: tuple[str, str, Plan, Sequence[str], re.Pattern[str]] | None = None
        """The latest line if it has values, what is behind its prefix, its plan, its numbers, and what finds them."""
        self.has_skipped = False
        """Whether a line that looks like metrics was too long, as a whole or in part."""

    def recall(self, text: str, below: Hashable) -> ParsedLine | None:
        """Return what a line with values says if it differs in digits only from lines that are remembered, and is below
        the same."""
        self._latest, self._key = None, (text.encode(errors="surrogatepass").translate(_SAME_DIGIT), below)
        form = self._forms.get(self._key)
        if form is None:
            return None
        fields = form.fields(text)
        plan = form.plans.get(fields[form.num_numbers :])
        if plan is None or not (line := self._values_of(plan, fields[: form.num_numbers])).values:
            return None
        self._previous = text
        return line

    def remember(self, text: str) -> None:
        """Keep the form of a line that was not recalled, once there are two such lines."""
        if self._latest is None or self._latest[0] != text or len(text) > MAX_FORM_LENGTH or text.endswith((":", ": ")):
            return
        _, stripped, plan, numbers, pattern = self._latest
        if self._key not in self._forms:
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            self._forms[self._key] = None
            return
        spans, begin = [match.span(1) for match in pattern.finditer(stripped)], len(text) - len(stripped)
        # What the prefix, a bar or `1.#QNAN` change is parsed each time.
        if text[begin:] != stripped or [stripped[slice(*span)] for span in spans] != numbers or "#" in text:
            return
        # Behind the first number of a row, its texts are no names.
        end = len(stripped) if pattern is _NUMBER else spans[0][0]
        others = _DIGITS.finditer(pattern.sub(lambda match: " " * len(match[0]), stripped), 0, end)
        # Without the last one, the fields may be no tuple.
        fields = [slice(begin + start, begin + stop) for start, stop in (*spans, *(match.span() for match in others))]
        form = self._forms[self._key] or _Form(itemgetter(*fields, slice(0)), len(numbers), {})
        if len(form.plans) < MAX_PLANS_OF_FORM:
            form.plans[form.fields(text)[form.num_numbers :]] = plan
        self._forms[self._key] = form

    def parse(self, text: str, context: Context = "") -> ParsedLine | None:
        """Return what a line without colors says; None if it has neither metrics nor a position."""
        if len(text) > MAX_LINE_LENGTH or _NO_METRICS.match(text) is not None:
            self._skip(text)
            return None
        stripped = strip_prefix(text)
        if stripped is None:
            return None
        previous, self._previous = self._previous, text
        if "] = " in stripped and (match := _QUALIFIED.fullmatch(stripped)) is not None:
            previous = strip_prefix(previous) or ""
            if _QUALIFIED.fullmatch(previous) is None:
                heading = _HEADING.fullmatch(previous)
                self._group = f"{heading[1]}/" if heading is not None else ""
            name = " ".join(f"{self._group}{match['name']}".split())
            return ParsedLine({name: self._value(match["value"])}, held_out=True)
        if ")" in stripped or "第" in stripped or "atch" in stripped:
            for part, pattern, replacement in _REWRITTEN:
                stripped = pattern.sub(replacement, stripped, MAX_FREE_NUMBERS) if part in stripped else stripped
        if "{" in stripped and 0 <= stripped.find("{") < stripped.rfind("}"):
            return self._parse_object(text, stripped)
        if self._has_glued:
            stripped = _GLUED.sub(r"\g<0> ", stripped)
        texts, numbers = _split(stripped)
        if len(numbers) > MAX_FREE_NUMBERS:
            return self._parse_object(text, stripped)
        shape = "\0".join(texts)
        plan = self._plans.get((shape, "axis")) or self._plans.get((shape, context))
        if plan is None:
            if _SIGNS.search(stripped) is None and not has_known_word(stripped):
                return None
            if max(map(len, texts)) > MAX_TEXT_LENGTH:
                self._skip(text)
                return None
            if not self._has_glued and _GLUED.search(stripped) is not None:
                self._has_glued = True
                return self.parse(text, context)
            # Text without numbers is a heading if it has a source, else nothing.
            plan = make_plan(texts, context) if numbers or source_of(stripped) else Plan()
            self._keep(plan, shape, "axis" if plan.has_axis else context)
        if plan.is_accepted or plan.may_be_learned:
            self._latest = (text, stripped, plan, numbers, _NUMBER)
            return self._values_of(plan, numbers)
        return replace(self._read(plan, numbers), values={}) if plan.is_heading else None

    def _keep(self, plan: Plan, shape: str, context: Context | Literal["axis", "object"]) -> None:
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[shape, context] = plan

    def _skip(self, text: str) -> None:
        """Note that a line is not read, if it would be if it was shorter."""
        if len(text) > MAX_TEXT_LENGTH and may_be_metric(text[:MAX_LINE_CHARS]):
            self.has_skipped = True

    def learn(self, candidate: Candidate) -> None:
        """Take the unknown names of a candidate as metrics from now on."""
        self._learned.add(candidate.names)

    def read_row(self, text: str, plan: Plan, numbers: Sequence[str], pattern: re.Pattern[str]) -> ParsedLine:
        """Return the values of a row of a table. The pattern finds its numbers."""
        self._latest = (text, text, plan, numbers, pattern)
        return self._read(plan, numbers)

    def _values_of(self, plan: Plan, numbers: Sequence[str]) -> ParsedLine:
        line = self._read(plan, numbers)
        if not plan.is_accepted:
            candidate = _candidate(line, has_axis=plan.has_axis)
            line.candidate = None if candidate.names in self._learned else candidate
        return line

    def _read(self, plan: Plan, texts: Sequence[str]) -> ParsedLine:
        number_at = self._converted(texts)
        line = ParsedLine(
            {name: number_at(number) * scale for name, number, scale in plan.pairs},
            held_out=plan.held_out,
            source=plan.source,
            is_training=plan.is_training,
        )
        for position in plan.steps:
            step, total = _whole(number_at(position.number) * position.scale), position.total
            if total is not None:
                total = _whole(number_at(total) * position.scale) if total >= 0 else 0
            if step is not None and not (position.is_fraction and (total is None or step > total)):
                line.step, line.total, line.step_name = step, total, position.name
                break
        if plan.epoch is not None:
            line.epoch = to_epoch(number_at(plan.epoch))
            line.has_exact_epoch = plan.has_exact_epoch and line.epoch is not None
        if plan.rank is not None:
            line.rank = _whole(number_at(plan.rank))
        for name, number, other in plan.ratios:
            if is_result(name) and number_at(other) > 0:
                line.values[name] = number_at(number) / number_at(other)
            elif not is_result(name) and "." in texts[other]:
                # `D(G(z)): 0.1 / 0.2`, but not `images: 100 / 200`
                line.values |= {name: number_at(number), f"{name}_2": number_at(other)}
        if plan.averages:
            line.averages = {name: number_at(number) for name, number in plan.averages}
        return line

    def _converted(self, texts: Sequence[str]) -> Callable[[int], float]:
        """Return a function of the index of a number."""
        try:
            return [*map(float, texts)].__getitem__
        except ValueError:
            return lambda index: self._value(texts[index])

    def _value(self, text: str) -> float:
        """Return a number. A comma is a decimal one where it can be nothing else, and then in all further numbers."""
        is_sure = self._has_decimal_commas or THOUSANDS.fullmatch(text) is None
        is_decimal = is_sure and text.count(",") == 1 and "." not in text
        self._has_decimal_commas = self._has_decimal_commas or is_decimal
        number = parse_number(text.replace(",", "." if is_decimal else ""))
        return math.nan if number is None else number

    def _parse_object(self, text: str, stripped: str) -> ParsedLine | None:
        """Return the numbers of an object of JSON or Python. The text before it may have a position."""
        parts = _NUMBER.split(stripped, MAX_NUMBERS + 1)
        numbers, shape = parts[1::2], "\0".join(parts[::2])
        plan = self._plans.get((shape, "object"))
        if plan is not None:
            self._latest = (text, stripped, plan, numbers, _NUMBER) if plan.is_accepted else None
            return self._read(plan, numbers) if plan.is_accepted else None
        begin, end = stripped.find("{"), stripped.rfind("}") + 1
        if 0 <= begin < end:
            row = _read_object(stripped[begin:end]) or _read_objects(stripped[:end])
        else:
            end = len(stripped)
            begin, row = _read_pairs(stripped) if len(numbers) <= MAX_NUMBERS else (0, {})
            if not row:
                self._skip(text)
        if not row:
            return None
        if len(row) > MAX_NUMBERS:
            self.has_skipped = True
            row.popitem()
        before, braces = stripped[:begin], stripped[begin:end]
        columns = Columns.find(row)
        has_axis = columns.step is not None or columns.epoch is not None
        is_terse = len(_WORDS.findall(before)) <= 2 * MAX_OTHER_WORDS
        texts, numbers_before = _split(before)
        plan = replace(make_plan(texts), pairs=[], ratios=[], averages=[])
        plan.is_accepted = is_terse and are_results(list(row), has_axis=has_axis)
        # Mostly, the numbers of the text are those of the object, in all lines of the shape.
        row_numbers = [*numbers_before, *map(repr, row.values())]
        plan.has_exact_epoch = columns.epoch is not None
        source = source_of(before) or next(map(source_of, _SPLIT.findall(braces)), "")
        plan.is_training, plan.source = source == "train", "" if source == "train" else source
        for index, name in enumerate(row, len(numbers_before)):
            if name == columns.step:
                plan.steps = [StepNumber(index)]
            elif name == columns.epoch:
                plan.epoch = index
            elif name not in columns and not is_position(name):
                plan.pairs.append((with_source(name, plan.source), index, 1.0))
        plan.held_out = all(is_held_out(name) for name, _, _ in plan.pairs if is_result(name))
        if [*map(parse_number, numbers)] == [*map(parse_number, numbers_before), *row.values()]:
            self._keep(plan, shape, "object")
        return self._read(plan, row_numbers) if plan.is_accepted else None


def _whole(value: float) -> int | None:
    return int(value) if value.is_integer() and abs(value) < MAX_STEP else None


def _candidate(line: ParsedLine, *, has_axis: bool) -> Candidate:
    """Return what may make the names of a line metrics. Without a position, its first value may be a step."""
    # Units may differ between lines with the same names.
    names = "\0".join(line.values)
    if has_axis:
        return Candidate(names, (line.epoch or 0.0, float(line.step or 0)), True)
    first, counter = next(iter(line.values.items()))
    if counter.is_integer():
        line.step = to_step(line.values.pop(first))
    return Candidate(names, (0.0, counter), False)


def _split(text: str) -> tuple[list[str], list[str]]:
    """Return the texts between the numbers of a line, and its numbers."""
    if not text.isascii() or "%|" in text:
        text = _BAR.sub("%|", text)
        for odd, plain in () if text.isascii() else _NORMAL.items():
            text = text.replace(odd, plain)
    if "  " in text or "\t" in text:
        text = _BLANKS.sub("  ", text)
    parts = _NUMBER.split(text.rstrip(), MAX_FREE_NUMBERS + 1)
    return parts[::2], parts[1::2]


# Objects

_SPLIT = re.compile(rf"['\"]_?(?:{'|'.join(SPLIT_NAMES)})['\"]:\s{{0,4}}['\"](\w{{2,12}})['\"]")

_OBJECTS = re.compile(r"(?<!\w)(\w{1,40}+)\W{1,3}(\{[^{}]*+\})")

_JSON_NUMBER = r"[-+]?+(?:(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][-+]?+\d++)?+|(?:nan|inf|infinity)(?![a-zA-Z]))"
_WRAPPED = re.compile(
    rf"(?<=[:,\s])(?:\w{{1,20}}\.)?(?:tensor|float\d{{1,3}}|int\d{{1,3}}|Array)\(({_JSON_NUMBER})[^()]{{0,80}}\)",
    re.IGNORECASE,
)
# `"epoch": "1/10"`
_QUOTED = re.compile(r"\"(\d{1,20})/\d+\"(?=\s{0,4}[,}])")
# `actor/entropy:0.5 - `, but no name of several words
_PAIR = re.compile(
    rf"(?<![\w@./%-])(?<![A-Za-z_)] )([A-Za-z_][\w@./%-]*+)\s?[:=]\s?({_JSON_NUMBER})(?=[\s,;|]|$)", re.IGNORECASE
)
_LITERALS = {"None": "null", "True": "true", "False": "false", "nan": "NaN", "inf": "Infinity"}
_LITERAL = re.compile(rf"(?<=[:,\s\[-])(?:{'|'.join(_LITERALS)})(?=\s{{0,4}}[,}}\]])")


def _read_objects(text: str) -> dict[str, float]:
    """Return the numbers of several objects with a word before each: `train: {'loss': 3}, val: {'loss': 4}`."""
    parts = _OBJECTS.findall(text) if text.count("{") <= MAX_OBJECTS else ()
    values = (
        (name if word.isdigit() else f"{word}/{name}", value)
        for word, part in parts
        for name, value in _read_object(part).items()
    )
    return dict(islice(values, MAX_NUMBERS + 1))


def _read_pairs(text: str) -> tuple[int, dict[str, float]]:
    """Return where the pairs of a line begin, and these, if all numbers from there on are of a name each."""
    pairs = [*_PAIR.finditer(text)]
    begin, row = pairs[0].start() if pairs else 0, flat_numbers({pair[1]: pair[2] for pair in pairs})
    return begin, row if len(row) == len(_NUMBER.findall(text, begin)) else {}


def _read_object(text: str) -> dict[str, float]:
    """Return the numbers of an object of JSON or Python, whose numbers may be text."""
    if '"' not in text:
        text = text.replace("'", '"')
    if "(" in text:
        text = _WRAPPED.sub(lambda match: match[1], text)
    if any(part in text.lower() for part in ("none", "true", "false", "nan", "inf")):
        text = _LITERAL.sub(lambda match: _LITERALS[match[0]], text)
    return flat_numbers(parse_json_object(_QUOTED.sub(r"\1", text)) or {}, MAX_NUMBERS + 1)
