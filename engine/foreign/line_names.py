"""Classify the names in printed lines: results, settings, positions, and training or validation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from string import digits
from typing import NamedTuple


def _set_of(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Names are read in lower case, with `_` between the words of camel case. A word is letters, apart from `f1`.
_WORDS = re.compile(r"f1(?:score)?(?![a-z])|(?:l|rouge)[12](?![a-z])|[a-z]+|损失|准确率|奖励")
# Words, and two words that follow each other, whatever is between them. `valloss`, too
_RESULTS = frozenset(
    source + word
    for source in ("", "train", "val", "valid", "test", "eval")
    for word in _set_of(
        "loss losses logloss mlogloss acc accuracy prec ap map f1 f1score auc auroc recall iou miou io_u dice psnr ssim"
        " bleu rouge rouge1 rouge2 rougel meteor wer cer mae mse rmse mape nll ppl perplexity bpb bpc elbo fid xent"
        " x_ent crossentropy cross_entropy ndcg mrr spearman pearson exact_match lpips kappa mcc pesq stoi sisdr si_sdr"
        " success_rate win_rate sps error_rate rew reward rewards return returns 损失 准确率 奖励"
    )
)
# Results beside a position, a word for validation, or another result.
_WEAK_RESULTS = _set_of("score scores l1 l2 norm objective cost episode_len episode_length ep_len kl entropy error err")
# A loss weight is no loss, and the value that it has in a configuration is no result.
_NO_RESULTS = _set_of(
    "weight weights scale coef coeff coefficient factor lambda alpha beta gamma eps threshold thresh target margin fn"
    " func type clip_norm clip_value clip_grad clip_range every freq count window limit mode min_delta"
)
# Names of a configuration. A line with more of them than of results shows arguments.
_SETTINGS = _set_of("seed decay momentum warmup workers smoothing dropout patience epochs size")
_RATES = _set_of("lr learning_rate")
_HELD_OUT = _set_of("val valid validation validate dev cv test testing eval evaluation")
# Positions, plans and processes are no metrics.
_POSITIONS = _set_of(
    "v_num eta progress update updates rank pid ip gpu device world_size step steps max_step max_steps num_step"
    " num_steps total_step total_steps micro_step micro_steps valid_step valid_steps global_step episode episodes iter"
    " max_iter iteration iterations timestep timesteps total_timestep total_timesteps batch batchsize batch_size port"
    " seed version line remaining remaining_time elapsed elapsed_time"
)
_EPOCHS = _set_of("epoch epochs")
_ALL_WORDS = frozenset(
    word
    for terms in (_RESULTS, _WEAK_RESULTS, _SETTINGS, _RATES, _HELD_OUT, _POSITIONS, _EPOCHS, {"interval"})
    for term in terms
    for word in term.split("_")
)
_LINE_WORDS = (
    _RESULTS
    | _WEAK_RESULTS
    | _RATES
    | _set_of(
        "learning epoch epochs step steps iter iters iteration iterations it itr update updates batch round rounds"
    )
)
_SOURCES = re.compile(
    r"(?<![\w/.-])(?:(?P<train>train(?:ing)?)|(?P<val>val|valid|validation|validate|validating|dev|(?<!\[)cv)"
    r"|(?P<test>test|testing)|(?P<eval>eval|evaluation|evaluating))(?:_(?:step|epoch|end|loop))?(?![\w/])",
    re.IGNORECASE,
)
SPLIT_NAMES = ("split", "mode", "phase", "stage", "subset", "type", "event")
"""Names of the text in a row that says what its values were measured on."""
MAX_LINE_CHARS = 400
_FILLERS = _set_of("avg average mean current running")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


@lru_cache(maxsize=2048)
def folded(name: str) -> str:
    """Return a name in lower case, with `_` between the words of camel case."""
    return name if name.islower() else _CAMEL.sub("_", name).lower()


class _Meaning(NamedTuple):
    """What a name may be that of."""

    is_result: bool = False
    is_weak_result: bool = False
    is_setting: bool = False
    is_rate: bool = False
    is_held_out: bool = False
    is_position: bool = False


_NO_MEANING = _Meaning()


@lru_cache(maxsize=4096)
def _meaning(name: str) -> _Meaning:
    text = folded(name)
    words = _WORDS.findall(text)
    if _ALL_WORDS.isdisjoint(words):
        return _NO_MEANING
    terms, last = _terms(words), words[-1]
    is_clear = _NO_RESULTS.isdisjoint(terms) and last != "clip"
    is_result, is_rate = is_clear and not _RESULTS.isdisjoint(terms), not _RATES.isdisjoint(terms)
    # `valid/max_steps`, `epoch_start`, `valid_num_updates`
    base = text.rpartition("/")[2].rpartition(".")[2]
    is_position = base in _POSITIONS or base.endswith("num_updates") or not _EPOCHS.isdisjoint(base.split("_"))
    return _Meaning(
        is_result,
        is_clear and (is_rate or not _WEAK_RESULTS.isdisjoint(terms)),
        not _SETTINGS.isdisjoint(terms) or last == "interval",
        is_rate,
        not _HELD_OUT.isdisjoint(terms),
        is_position and not is_result,
    )


def _terms(words: Sequence[str]) -> set[str]:
    """Return words, and each two that follow each other."""
    return {*words, *map("_".join, pairwise(words))}


def has_known_word(text: str) -> bool:
    """Whether a line has a word that is the name of a result or of a position."""
    return not _LINE_WORDS.isdisjoint(_WORDS.findall(text.lower()))


def may_be_metric(text: str) -> bool:
    """Whether a line has the name of a result before a number."""
    last_digit = max(map(text.rfind, digits)) if len(text) <= MAX_LINE_CHARS else 0
    return not _RESULTS.isdisjoint(_terms(_WORDS.findall(text[: max(last_digit, 0)].lower())))


def joined(words: Sequence[str]) -> str:
    """Return the name that some words are; a single one keeps its case."""
    cleaned = [word.replace("'s", "").rstrip(".-") for word in words]
    return cleaned[0] if len(cleaned) == 1 else folded("_".join(cleaned))


def is_result(name: str) -> bool:
    """Whether a name is that of a loss, an accuracy or another result."""
    return _meaning(name).is_result


def is_held_out(name: str) -> bool:
    """Whether a name says that a metric was measured on other data than that of the training."""
    return _meaning(name).is_held_out


def is_position(name: str) -> bool:
    """Whether a name is that of a step, an epoch, a plan or a process: never of a metric."""
    return _meaning(name).is_position


def is_setting(name: str) -> bool:
    """Whether a name is that of a configuration."""
    return _meaning(name).is_setting


def is_weak_result(name: str) -> bool:
    """Whether a name is that of a result beside a position or another result."""
    return _meaning(name).is_weak_result


def are_results(names: Sequence[str], *, has_axis: bool, has_source: bool = False) -> bool:
    """Whether the names of a line are those of results, not of a configuration.

    `has_axis` tells that the line has a position, and `has_source` that it says what was measured on.
    """
    num_results, num_settings = sum(map(is_result, names)), sum(map(is_setting, names))
    if num_results or num_settings:
        return num_results >= max(num_settings, 1)
    weak = [name for name in names if is_weak_result(name)]
    return bool(weak) and (has_axis or ((has_source or any(map(is_held_out, weak))) and not _meaning(weak[0]).is_rate))


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
