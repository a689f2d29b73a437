"""Find the values of metrics in one line of the output of a training.

A guess is conservative: a line counts only if one of its names is that of a result, such as a loss or an accuracy, and
if little other text is in it. `output_metrics` calls it, and knows what earlier lines said.

The cost of a line is linear in its length: quantifiers are possessive or bounded, and none is inside another one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from engine.foreign.reading import Columns, flat_numbers, parse_json_object, parse_number, to_step

MAX_LINE_LENGTH = 4000
"""Longer lines have no metrics."""
MAX_PAIRS_LENGTH = 800  # of a line that is no object: a terminal has 160 columns
MAX_OTHER_WORDS = 3  # beside the names of metrics; a sentence has more
MIN_HEADING_COLUMNS = 3

# In lower case, with `_` between the words of camel case.
_RESULTS = re.compile(
    r"(?<![a-z])(?:train|val|valid|test|eval)?"
    r"(?:loss(?:es)?|m?logloss|acc|accuracy|prec|ap|map|f1|f1score|auc|roc_auc|auroc|recall|iou|miou|io_u|dice|psnr|ssim"
    r"|bleu|rouge[l\d]?|meteor|wer|cer|mae|mse|rmse|mape|nll|ppl|perplexity|bpb|bpc|elbo|fid|cross_?entropy|reward|rewards)"
    r"(?![a-z])"
)
# A loss weight is no loss, and the value that it has in a configuration is no result.
_NO_RESULTS = re.compile(
    r"(?<![a-z])(?:weights?|scale|coeff?|coefficient|factor|lambda|alpha|beta|gamma|eps|threshold|thresh|target|margin|fn"
    r"|func|function|type|clip|every|freq|count|window|limit|mode)(?![a-z])"
)
# Names of a configuration. A line with more of them than of results shows arguments.
_SETTINGS = re.compile(
    r"(?<![a-z])(?:seed|decay|momentum|warmup|workers|smoothing|dropout|patience|interval|epochs|size)(?![a-z])"
)
_RATES = re.compile(r"(?<![a-z])(?:lr|learning_rate)(?![a-z])")
# Parts of names: a line without any of them has no metrics. Searching for them costs little.
_PARTS = (
    "loss", "acc", "prec", "ap", "f1", "auc", "auroc", "recall", "iou", "dice", "psnr", "ssim", "bleu", "rouge",
    "meteor", "wer", "cer", "mae", "mse", "nll", "ppl", "perplex", "bpb", "bpc", "elbo", "fid", "entropy", "reward",
    "lr", "learning",
)  # fmt: skip
_STEP_PARTS = ("step", "it", "update", "batch")
_SOURCE_PARTS = ("train", "val", "test", "dev")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_IGNORED = frozenset({
    "v_num", "eta", "rank", "pid", "gpu", "device", "world_size", "steps", "max_steps", "max_epochs", "num_epochs",
    "batchsize", "batch_size",
})  # fmt: skip
# Names whose value may follow after blanks alone.
_BARE = re.compile(r"(?<![a-z])(?:time|data|grad_?norm|norm|gnorm|mfu|wps|ups|tps|tflops)(?![a-z])")

_NUMBER = (
    r"[-+]?+(?:(?:\d++(?:,\d{3}(?!\d))*+(?:\.\d*+)?+|\.\d++)(?:[eE][-+]?+\d++)?+|(?:nan|inf|infinity)(?![a-zA-Z]))"
)
# What may follow a number: no letter as in `5ms`, no second dot as in a version, no operator as in code, no date.
_NUMBER_END = r"(?![\w/:+^=<>-]|\.\w|,\d|[ \t]{0,4}[*^])"
_PAIR = re.compile(
    r"(?<![\w@./%+?&=$\\-])"
    r"(?:(?P<qualifier>train|training|valid|validation|val|test|eval|evaluation|avg|average|mean|best|total|running) )?"
    r"(?P<name>[A-Za-z_][\w@./%+-]*+)"
    r"(?P<sep>[ \t]*+[=:][ \t]*+|[ \t]++)(?:tensor\()?+"
    rf"(?P<value>{_NUMBER})(?:/(?P<of>\d++))?+{_NUMBER_END}%?+",
    re.IGNORECASE,
)
# Also `Train: 3 [ 10/100` of timm, and `[3/10][10/100]`.
_EPOCH = re.compile(
    r"(?P<word>(?<![\w/.-])epoch)(?:\(\w{1,20}\))?[\s:=#\[]{0,6}(?P<epoch>\d{1,12}(?:\.\d{1,12})?)"
    r"(?:[ ]{0,2}/[ ]{0,2}\d{1,12})?(?![\w.])\]?"
    r"|(?P<mode>^\W{0,10}train(?=:\s\d{1,6}\s{1,4}\[)):\s(?P<number>\d{1,6})"
    r"|\[(?P<first>\d{1,9})/\d{1,9}\](?=\s?\[\s{0,8}\d{1,9}\s?/)",
    re.IGNORECASE,
)
_STEP = re.compile(
    r"(?<![\w/.-])(?P<name>(?:global|train|training)?[ _]?step|iteration|iter|it|num_updates|update|batch)"
    r"[\s:=#\[]{0,8}(?P<step>\d{1,3}(?:,\d{3}){1,4}|\d{1,15})(?:[ ]{0,2}/[ ]{0,6}(?P<steps>\d{1,15}))?(?![\w.]\w)\]?",
    re.IGNORECASE,
)
_FRACTION = re.compile(r"(?<![\w./:,-])(\d{1,12})[ ]{0,2}/[ ]{0,8}(\d{1,12})(?![\w./:-])")
_COUNT = re.compile(r"(?<![\w.])(\d{1,12})it \[|^\[(\d{1,12})\](?=\s)")
_DATE = re.compile(r"\d{2,4}[/-]\d{2}(?:[/-]\d{2,4})?[ T]\d\d:\d\d(?::\d\d)?")
# `2026-11-27 22:25:22,123 - root - INFO - `, `[INFO|trainer.py:123] `, `INFO:root:`
_LEVEL = re.compile(
    r"\b(DEBUG|INFO|NOTICE|WARNING|WARN|ERROR|CRITICAL|FATAL)\b(?:\s{0,4}[|:\]>-][\w.:|-]{0,80}[\]>:-]{0,3})?"
)
MAX_LEVEL_COLUMN = 100
_NO_METRICS = re.compile(
    r"\s{0,20}(?:wandb:|Traceback|File \"|[\w.]{0,120}(?:Error|Exception|Warning|Interrupt)\b|[+$#>] |https?:)"
)
# tqdm: `12/100 [00:01<00:08, `
_BAR = re.compile(r"(?P<count>\d{1,12})(?:/\d{1,12}|it) \[\d{2,3}:\d{2}")
# `Map: 100%|███| `: the name of a bar is no metric.
_PERCENT = re.compile(r":?\s{0,3}\d{1,3}%\|")
_WORDS = re.compile(r"(?<![\w./?%<@'-])[A-Za-z]{3,}+")
_SOURCES = re.compile(
    r"(?<![\w/.-])(?:(?P<train>train(?:ing)?)|(?P<val>val|valid|validation|validating|dev)|(?P<test>test|testing)"
    r"|(?P<eval>eval|evaluation|evaluating))(?![\w/.])",
    re.IGNORECASE,
)
_HELD_OUT_NAME = re.compile(r"(?<![a-z])(?:val|valid|validation|dev|test|eval)(?![a-z])")
_EPOCH_HEADING = re.compile(r"\W{0,10}epoch[\s:#\[]{1,4}(\d{1,9})(?:\s?/\s?\d{1,9})?\W{0,10}$", re.IGNORECASE)


@dataclass
class ParsedLine:
    """The values of a line, and where on the x axes they are as far as the line says so.

    `total` is the number of steps after which the counter of `step` starts again, None if it counts on. `held_out`
    tells that the values were measured on other data than that of the training, and `has_exact_epoch` that the epoch is
    a value of an object, which may have a fraction.
    """

    values: dict[str, float] = field(default_factory=dict)
    step: int | None = None
    total: int | None = None
    epoch: float | None = None
    held_out: bool = False
    has_exact_epoch: bool = False


def parse_line(text: str) -> ParsedLine | None:
    """Return what a line without colors says; None if it has no metric."""
    if not may_have_metrics(text) or _NO_METRICS.match(text) is not None:
        return None
    level = _LEVEL.search(text, 0, MAX_LEVEL_COLUMN)
    if level is not None:
        if level[1] not in ("DEBUG", "INFO", "NOTICE"):
            return None
        text = text[level.end() :]
    start, end = text.find("{"), text.rfind("}")
    if 0 <= start < end:
        return _parse_object(text[:start], text[start : end + 1])
    return _parse_pairs(text) if len(text) <= MAX_PAIRS_LENGTH else None


def may_have_metrics(text: str) -> bool:
    """Whether a line has a part of a known name. Most have none, and need no pattern."""
    return len(text) <= MAX_LINE_LENGTH and _has_any(text, _PARTS)


def _has_any(text: str, parts: Iterable[str]) -> bool:
    lower = text.lower()
    return any(part in lower for part in parts)


def parse_counter(text: str) -> int | None:
    """Return how far a progress bar is; None if the line is none."""
    match = _BAR.search(text) if len(text) <= MAX_PAIRS_LENGTH else None
    return int(match["count"]) if match is not None else None


def parse_epoch_heading(text: str) -> float | None:
    """Return the epoch of a line that says nothing else, such as `Epoch 3/10` of Keras."""
    match = _EPOCH_HEADING.match(text) if len(text) <= MAX_PAIRS_LENGTH else None
    return float(match[1]) if match is not None else None


@lru_cache(maxsize=2048)
def is_result(name: str) -> bool:
    """Whether a name is that of a loss, an accuracy or another result."""
    words = _CAMEL.sub("_", name).lower()
    return _RESULTS.search(words) is not None and _NO_RESULTS.search(words) is None


@lru_cache(maxsize=2048)
def is_held_out(name: str) -> bool:
    """Whether a name says that a metric was measured on other data than that of the training."""
    return _HELD_OUT_NAME.search(name.lower()) is not None


@lru_cache(maxsize=2048)
def _is_setting(name: str) -> bool:
    return _SETTINGS.search(_CAMEL.sub("_", name).lower()) is not None


def _is_accepted(names: list[str], *, has_axis: bool) -> bool:
    """Whether the names of a line are those of results, not of a configuration."""
    num_results = sum(map(is_result, names))
    num_settings = sum(map(_is_setting, names))
    if num_settings > num_results:
        return False
    return num_results > 0 or (has_axis and any(_RATES.search(name.lower()) for name in names))


# Objects

_WRAPPED = re.compile(
    rf"(?<=[:,\s])(?:\w{{1,20}}\.)?(?:tensor|float\d{{1,3}}|int\d{{1,3}}|Array)\(({_NUMBER})[^()]{{0,80}}\)",
    re.IGNORECASE,
)
_QUOTED = re.compile(rf"(?<=[:\s])\"({_NUMBER})\"(?=\s{{0,4}}[,}}])", re.IGNORECASE)
_LITERALS = {"None": "null", "True": "true", "False": "false", "nan": "NaN", "inf": "Infinity"}
_LITERAL = re.compile(rf"(?<=[:,\s\[-])(?:{'|'.join(_LITERALS)})(?=\s{{0,4}}[,}}\]])")


def _parse_object(before: str, text: str) -> ParsedLine | None:
    """Return the numbers of an object of JSON or Python, whose numbers may be text."""
    if len(before) > MAX_PAIRS_LENGTH or len(_WORDS.findall(before)) > 2 * MAX_OTHER_WORDS:
        return None
    if '"' not in text:
        text = text.replace("'", '"')
    if "(" in text:
        text = _WRAPPED.sub(r"\1", text)
    if _has_any(text, ("none", "true", "false", "nan", "inf")):
        text = _LITERAL.sub(lambda match: _LITERALS[match[0]], text)
    row = flat_numbers(parse_json_object(_QUOTED.sub(r"\1", text)) or {})
    if not row or not _is_accepted(list(row), has_axis=False):
        return None
    columns = Columns.find(row)
    line = ParsedLine()
    _find_axes(before, line)
    line.step = to_step(row.get(columns.step)) if columns.step else line.step
    if columns.epoch and math.isfinite(row[columns.epoch]):
        line.epoch, line.has_exact_epoch = row[columns.epoch], True
    line.values = {name: value for name, value in row.items() if name not in columns and name not in _IGNORED}
    line.held_out = all(is_held_out(name) for name in line.values if is_result(name))
    return line


# Pairs of a name and a number


def _parse_pairs(text: str) -> ParsedLine | None:
    line = ParsedLine()
    rest = _find_axes(_PERCENT.sub("|", _DATE.sub("", text)), line)
    names: dict[str, float] = {}
    values: list[tuple[int, int]] = []
    qualifier = ""
    for match in _PAIR.finditer(rest):
        if (found := _read_pair(match)) is not None:
            name, value = found
            qualifier = (match["qualifier"] or qualifier).lower()
            # `train loss 3 acc 0.5, val loss 4 acc 0.4`
            names.setdefault(f"{qualifier}_{name}" if qualifier and name in names else name, value)
            values.append(match.span())
    if not names or not _is_accepted(list(names), has_axis=line.step is not None or line.epoch is not None):
        return None
    others = _cut(rest, values)
    if _BAR.search(text) is None and len(_WORDS.findall(others)) > MAX_OTHER_WORDS:
        return None
    source = _source_of(others)
    line.values = {_full_name(name, source): value for name, value in names.items() if name.lower() not in _IGNORED}
    line.held_out = bool(source) or all(is_held_out(name) for name in names if is_result(name))
    return line


def _read_pair(match: re.Match[str]) -> tuple[str, float] | None:
    """Return the name and the value of a pair, None if it may be other text."""
    name, qualifier, whole = match["name"].rstrip(".-"), (match["qualifier"] or "").lower(), match["of"]
    key = _CAMEL.sub("_", name).lower()
    is_bare = "=" not in match["sep"] and ":" not in match["sep"]
    if is_bare and not (is_result(name) or _RATES.search(key) or _BARE.search(key)):
        return None
    value = parse_number(match["value"].replace(",", ""))
    if value is None or (whole is not None and (not int(whole[:15]) or not is_result(name))):
        return None
    if qualifier and qualifier not in ("avg", "average", "mean"):
        name = f"{qualifier}_{key}"
    return name, value / int(whole) if whole is not None and len(whole) <= 15 else value


def _find_axes(text: str, line: ParsedLine) -> str:
    """Set step and epoch of a line, and return the text without them."""
    if (epoch := _EPOCH.search(text)) is not None:
        value = next(name for name in ("epoch", "number", "first") if epoch[name] is not None)
        line.epoch = float(epoch[value])
        # `Epoch(val)` says what the values were measured on.
        text = _cut(text, [epoch.span("word"), (epoch.start(value), epoch.end())])
    if _has_any(text, _STEP_PARTS) and (step := _STEP.search(text)) is not None:
        line.step = int(step["step"].replace(",", ""))
        is_part = step["steps"] is not None or step["name"].lower() == "batch"
        line.total = int(step["steps"] or 0) if is_part else None
        return _cut(text, [step.span()])
    for fraction in _FRACTION.finditer(text):
        if int(fraction[1]) <= int(fraction[2]) and not _is_value(text, fraction.start()):
            line.step, line.total = int(fraction[1]), int(fraction[2])
            return _cut(text, [fraction.span()])
    if (count := _COUNT.search(text)) is not None:
        line.step, line.total = int(count[1] or count[2]), 0 if count[1] else None
    return text


def _is_value(text: str, position: int) -> bool:
    """Whether the number at a position is the value of a name: `Accuracy: 9812/10000`."""
    before = text[max(position - 40, 0) : position].rstrip()
    return before.endswith(("=", ":")) and is_result(before[:-1].rsplit(None, 1)[-1] if before[:-1].strip() else "")


def _cut(text: str, spans: list[tuple[int, int]]) -> str:
    """Return the text with a bar in place of each span, so that what is around it stays apart."""
    for start, end in sorted(spans, reverse=True):
        text = f"{text[:start]} | {text[end:]}" if end > start >= 0 else text
    return text


def _source_of(others: str) -> str:
    """Return what the values of a line were measured on, by a word that is no part of a name; "" for the training."""
    match = _SOURCES.search(others) if _has_any(others, _SOURCE_PARTS) else None
    return (match.lastgroup or "").replace("train", "") if match is not None else ""


def _full_name(name: str, source: str) -> str:
    return f"{source}/{name}" if source and not is_held_out(name) else name


# Tables

_HEADING_NAME = re.compile(r"[A-Za-z][\w@./%()-]{0,60}")
_TABLE_END = re.compile(r":\s{1,8}\d{1,3}%")


def parse_heading(text: str) -> list[str] | None:
    """Return the names of the columns of a table, such as that of ultralytics; None for any other line."""
    if len(text) > MAX_PAIRS_LENGTH or not may_have_metrics(text):
        return None
    names = [name.strip("():").replace("(", "/") for name in _without_bar(text).split()]
    if len(names) < MIN_HEADING_COLUMNS or not all(_HEADING_NAME.fullmatch(name) for name in names):
        return None
    # A sentence has few names of results in it.
    return names if sum(map(is_result, names)) * 6 >= len(names) and "  " in text.strip() else None


def parse_row(text: str, heading: list[str]) -> ParsedLine | None:
    """Return the values of a row of a table: results, and what has a decimal point."""
    if len(text) > MAX_PAIRS_LENGTH:
        return None
    cells = _without_bar(text).split()
    is_training = bool(cells) and _FRACTION.fullmatch(cells[0]) is not None
    if len(cells) != len(heading) or not (is_training or cells[0] == "all"):
        return None
    line = ParsedLine(held_out=not is_training)
    if is_training:
        line.epoch = float(cells[0].partition("/")[0])
    for name, cell in zip(heading[1:], cells[1:], strict=True):
        value = parse_number(cell)
        if value is not None and (is_result(name) or "." in cell):
            line.values[name] = value
    return line if line.values else None


def _without_bar(text: str) -> str:
    end = _TABLE_END.search(text)
    return text[: end.start()] if end is not None else text
