"""Classify the names in printed lines: results, settings, positions, and training or validation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

# All patterns read names in lower case, with `_` between the words of camel case.
_RESULTS = re.compile(
    r"(?<![a-z])(?:train|val|valid|test|eval)?"
    r"(?:loss(?:es)?|m?logloss|acc|accuracy|prec|ap|map|f1|f1score|auc|roc_auc|auroc|recall|iou|miou|io_u|dice|psnr|ssim"
    r"|bleu|rouge[l\d]?|meteor|wer|cer|mae|mse|rmse|mape|nll|ppl|perplexity|bpb|bpc|elbo|fid|x_?ent|cross_?entropy"
    r"|ndcg|mrr|spearman|pearson|exact_match|lpips|kappa|mcc|pesq|stoi|si_?sdr|success_rate|win_rate|sps"
    r"|error_rate|rew|rewards?|returns?|损失|准确率|奖励)"
    r"(?![a-z])"
)
# Results beside a position, a word for validation, or another result.
_WEAK_RESULTS = re.compile(
    r"(?<![a-z])(?:scores?|l1|l2|norm|objective|cost|episode_len(?:gth)?|ep_len|kl|entropy|error|err)(?![a-z])"
)
# A loss weight is no loss, and the value that it has in a configuration is no result.
_NO_RESULTS = re.compile(
    r"(?<![a-z])(?:weights?|scale|coeff?|coefficient|factor|lambda|alpha|beta|gamma|eps|threshold|thresh|target|margin|fn"
    r"|func|type|clip(?=$|_(?:norm|value|grad|range))|every|freq|count|window|limit|mode|min_delta)(?![a-z])"
)
# Names of a configuration. A line with more of them than of results shows arguments.
_SETTINGS = re.compile(
    r"(?<![a-z])(?:seed|decay|momentum|warmup|workers|smoothing|dropout|patience|interval(?!_)|epochs|size)(?![a-z])"
)
_RATES = re.compile(r"(?<![a-z])(?:lr|learning_rate)(?![a-z])")
_HELD_OUT = re.compile(r"(?<![a-z])(?:val|valid|validation|validate|dev|cv|test|testing|eval|evaluation)(?![a-z])")
# Positions, plans and processes are no metrics.
_POSITIONS = re.compile(
    r"(?:.*[/.])?(?:v_num|eta|progress|updates?|rank|pid|ip|gpu|device|world_size|(?:max_|num_|total_|micro_|valid_)?steps?|global_step"
    r"|episodes?|(?:\w+_)?epochs?(?:_\w+)?|(?:max_)?iter|iterations?|(?:\w+_)?num_updates|(?:total_)?timesteps|batch|batch_?size|port|seed"
    r"|version|line|remaining|remaining_time|elapsed|elapsed_time)"
)
_SOURCES = re.compile(
    r"(?<![\w/.-])(?:(?P<train>train(?:ing)?)|(?P<val>val|valid|validation|validate|validating|dev|(?<!\[)cv)"
    r"|(?P<test>test|testing)|(?P<eval>eval|evaluation|evaluating))(?:_(?:step|epoch|end|loop))?(?![\w/])",
    re.IGNORECASE,
)
SPLIT_NAMES = ("split", "mode", "phase", "stage", "subset", "type", "event")
"""Names of the text in a row that says what its values were measured on."""
MAX_LINE_CHARS = 400
_FILLERS = frozenset({"avg", "average", "mean", "current", "running"})
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


@lru_cache(maxsize=2048)
def folded(name: str) -> str:
    """Return a name in lower case, with `_` between the words of camel case."""
    return _CAMEL.sub("_", name).lower()


def may_be_metric(text: str) -> bool:
    """Whether a line has the name of a result before a number."""
    match = _RESULTS.search(text.lower()) if len(text) <= MAX_LINE_CHARS else None
    return match is not None and any(map(str.isdigit, text[match.end() :]))


def joined(words: Sequence[str]) -> str:
    """Return the name that some words are; a single one keeps its case."""
    cleaned = [word.replace("'s", "").rstrip(".-") for word in words]
    return cleaned[0] if len(cleaned) == 1 else folded("_".join(cleaned))


@lru_cache(maxsize=2048)
def is_result(name: str) -> bool:
    """Whether a name is that of a loss, an accuracy or another result."""
    words = folded(name)
    return _RESULTS.search(words) is not None and _NO_RESULTS.search(words) is None


@lru_cache(maxsize=2048)
def is_held_out(name: str) -> bool:
    """Whether a name says that a metric was measured on other data than that of the training."""
    return _HELD_OUT.search(name.lower()) is not None


@lru_cache(maxsize=2048)
def is_position(name: str) -> bool:
    """Whether a name is that of a step, an epoch, a plan or a process: never of a metric."""
    return _POSITIONS.fullmatch(folded(name)) is not None and not is_result(name)


@lru_cache(maxsize=2048)
def is_setting(name: str) -> bool:
    """Whether a name is that of a configuration."""
    return _SETTINGS.search(folded(name)) is not None


@lru_cache(maxsize=2048)
def is_weak_result(name: str) -> bool:
    """Whether a name is that of a result beside a position or another result."""
    words = folded(name)
    is_named = _WEAK_RESULTS.search(words) is not None or _RATES.search(words) is not None
    return is_named and _NO_RESULTS.search(words) is None


def are_results(names: Sequence[str], *, has_axis: bool, has_source: bool = False) -> bool:
    """Whether the names of a line are those of results, not of a configuration.

    `has_axis` tells that the line has a position, and `has_source` that it says what was measured on.
    """
    num_results, num_settings = sum(map(is_result, names)), sum(map(is_setting, names))
    if num_results or num_settings:
        return num_results >= max(num_settings, 1)
    weak = [name for name in names if is_weak_result(name)]
    return bool(weak) and (
        has_axis or ((has_source or any(map(is_held_out, weak))) and not _RATES.search(folded(weak[0])))
    )


def source_of(text: str) -> str:
    """Return what a text says that values were measured on: train, val, test, eval, or "" if it does not."""
    found = [match.lastgroup or "" for match in _SOURCES.finditer(text)]
    # `Evaluating train: `
    return next((source for source in found if source != "eval"), found[0] if found else "")


def source_of_row(texts: Mapping[str, object]) -> str:
    """Return what the texts of a row say that its values were measured on; "" for the training."""
    source = next((source_of(text) for key in SPLIT_NAMES if isinstance(text := texts.get(key), str)), "")
    return "" if source == "train" else source


def is_source(word: str) -> bool:
    """Whether a word only says what was measured on."""
    return _SOURCES.fullmatch(word) is not None


def without_source(name: str) -> str:
    """Return a name without the words that say what was measured on."""
    return "_".join(word for word in re.split(r"[_/ ]", name) if not is_source(word))


def with_source(name: str, source: str) -> str:
    """Return the full name of a metric that was measured on a source."""
    return f"{source}/{name}" if source and not is_held_out(name) else name


class LineNames:
    """The names of one line: each once, with the source that the words before them say."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._source = ""
        self._is_leading = False
        """Whether the first name has a source, which is that of all behind it."""

    def add(self, words: Sequence[str], heading: str, group: str = "") -> str:
        """Return the name that some words are. `heading` is a source that was named before them: `val: loss=3`. A name
        that was there before has its `group`: `loss[loss=3], tot_loss[loss=3]`."""
        kept = [word for word in words if word.lower() not in _FILLERS] or list(words)
        name = joined(kept)
        own = source_of(" ".join(kept[:-1])) if len(kept) > 1 else ""
        if own:
            self._source = own if own != "train" or self._source else ""
            self._is_leading = self._is_leading or not self._known
        elif heading:
            name = name if heading == "train" else with_source(name, heading)
        elif self._source and is_result(name) and not is_held_out(name) and (name in self._known or self._is_leading):
            name = f"{self._source}_{name}"
        if name in self._known and len(kept) < len(words):
            name = joined(words)
        if name in self._known and group:
            name = f"{group}/{name}"
        self._known.add(name)
        return name
