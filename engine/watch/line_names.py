"""Classify the names in printed lines: results, settings, positions, and training or validation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from string import digits

# Names are read in lower case, with `_` between the words of camel case. A word is letters, apart from `f1`.
_WORDS = re.compile(r"f1(?:score)?(?![a-z])|(?:l|rouge)[12](?![a-z])|[a-z]+|损失|准确率|奖励")
# What a name is that has one of these words, or two that follow each other, whatever is between them
_TERMS = {
    "result": (
        "loss losses logloss mlogloss acc accuracy prec ap map f1 f1score auc auroc recall iou miou io_u dice psnr ssim"
        " bleu rouge rouge1 rouge2 rougel meteor wer cer mae mse rmse mape nll ppl perplexity bpb bpc elbo fid xent"
        " x_ent crossentropy cross_entropy ndcg mrr spearman pearson exact_match lpips kappa mcc pesq stoi sisdr si_sdr"
        " success_rate win_rate sps error_rate rew reward rewards return returns 损失 准确率 奖励"
    ),
    # A result beside a position, a word for validation, or another result
    "weak result": "score scores l1 l2 norm objective cost episode_len episode_length ep_len kl entropy error err",
    # A loss weight is no loss, and the value that it has in a configuration is no result.
    "no result": (
        "weight weights scale coef coeff coefficient factor lambda alpha beta gamma eps threshold thresh target margin"
        " fn func type clip_norm clip_value clip_grad clip_range every freq count window limit mode min_delta"
    ),
    # Names of a configuration. A line with more of them than of results shows arguments.
    "setting": "seed decay momentum warmup workers smoothing dropout patience epochs size",
    "rate": "lr learning_rate",
    "held out": "val valid validation validate dev cv test testing eval evaluation",
}
_RESULTS = frozenset(
    # `valloss`
    source + term
    for source in ("", "train", "val", "valid", "test", "eval")
    for term in _TERMS["result"].split()
)
_KINDS = {term: ["result"] for term in _RESULTS}
for _kind, _terms in list(_TERMS.items())[1:]:
    for _term in _terms.split():
        _KINDS.setdefault(_term, []).append(_kind)
_PARTS = frozenset("_".join(_KINDS).split("_"))
# Whole names, behind that of a group. Positions, plans and processes are no metrics.
_POSITIONS = (
    "v_num eta progress update updates rank pid ip gpu device world_size step steps max_step max_steps num_step"
    " num_steps total_step total_steps micro_step micro_steps valid_step valid_steps global_step episode episodes iter"
    " max_iter iteration iterations timestep timesteps total_timestep total_timesteps batch batchsize batch_size port"
    " seed version line remaining remaining_time elapsed elapsed_time it #"
)
_POSITION_NAMES, _EPOCHS = frozenset(_POSITIONS.split()), frozenset({"epoch", "epochs"})
# Words without which a line without separators says nothing
_LINE_TERMS = (
    "learning lr epoch epochs step steps iter iters iteration iterations it itr update updates batch round rounds"
)
_LINE_WORDS = _RESULTS.union(_TERMS["weak result"].split(), _LINE_TERMS.split())
_SOURCES = re.compile(
    # The first character comes first, so that `re` skips all others at once.
    r"[cdetvCDETV](?<![\w/.-].)(?i:(?P<train>(?<=t)rain(?:ing)?)|(?P<test>(?<=t)est(?:ing)?)|(?P<val>(?<=d)ev"
    r"|(?<=v)al(?:id(?:ation|ate|ating)?)?|(?<!\[c)(?<=c)v)|(?P<eval>(?<=e)val(?:uation|uating)?))"
    r"(?i:_(?:step|epoch|end|loop))?(?![\w/])"
)
SPLIT_NAMES = ("split", "mode", "phase", "stage", "subset", "type", "event")
"""Names of the text in a row that says what its values were measured on."""
MAX_LINE_CHARS = 400
_FILLERS = frozenset({"avg", "average", "mean", "current", "running"})
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


def folded(name: str) -> str:
    """Return a name in lower case, with `_` between the words of camel case."""
    return name if name.islower() else _CAMEL.sub("_", name).lower()


@lru_cache(maxsize=4096)
def _kinds_of(name: str) -> set[str]:
    text = folded(name)
    words = _WORDS.findall(text)
    terms = () if _PARTS.isdisjoint(words) else _terms_of(words)
    kinds = {kind for term in terms if term in _KINDS for kind in _KINDS[term]}
    if words[-1:] == ["interval"]:
        kinds.add("setting")
    if "no result" in kinds or words[-1:] == ["clip"]:
        kinds -= {"result", "weak result"}
    elif "rate" in kinds:
        kinds.add("weak result")
    # `valid/max_steps`, `epoch_start`, `valid_num_updates`
    base = text.rpartition("/")[2].rpartition(".")[2]
    if "result" not in kinds and (
        base in _POSITION_NAMES
        or base.endswith("num_updates")
        or ("epoch" in base and not _EPOCHS.isdisjoint(base.split("_")))
    ):
        kinds.add("position")
    return kinds


def _terms_of(words: Sequence[str]) -> list[str]:
    """Return words, and each two that follow each other."""
    return [*words, *map("_".join, pairwise(words))]


def has_known_word(text: str) -> bool:
    """Whether a line has a word that is the name of a result or of a position."""
    return not _LINE_WORDS.isdisjoint(_WORDS.findall(text.lower()))


def may_be_metric(text: str) -> bool:
    """Whether a line has the name of a result before a number."""
    last_digit = max(map(text.rfind, digits)) if len(text) <= MAX_LINE_CHARS else 0
    return not _RESULTS.isdisjoint(_terms_of(_WORDS.findall(text[: max(last_digit, 0)].lower())))


def joined(words: Sequence[str]) -> str:
    """Return the name that some words are; a single one keeps its case."""
    cleaned = [word.replace("'s", "").rstrip(".-") for word in words]
    return cleaned[0] if len(cleaned) == 1 else folded("_".join(cleaned))


def is_result(name: str) -> bool:
    """Whether a name is that of a loss, an accuracy or another result."""
    return "result" in _kinds_of(name)


def is_held_out(name: str) -> bool:
    """Whether a name says that a metric was measured on other data than that of the training."""
    return "held out" in _kinds_of(name)


def is_position(name: str) -> bool:
    """Whether a name is that of a step, an epoch, a plan or a process: never of a metric."""
    return "position" in _kinds_of(name)


def is_setting(name: str) -> bool:
    """Whether a name is that of a configuration."""
    return "setting" in _kinds_of(name)


def is_weak_result(name: str) -> bool:
    """Whether a name is that of a result beside a position or another result."""
    return "weak result" in _kinds_of(name)


def are_results(names: Sequence[str], *, has_axis: bool, has_source: bool = False) -> bool:
    """Whether the names of a line are those of results, not of a configuration.

    `has_axis` tells that the line has a position, and `has_source` that it says what was measured on.
    """
    kinds = [*map(_kinds_of, names)]
    num_results, num_settings = sum("result" in each for each in kinds), sum("setting" in each for each in kinds)
    if num_results or num_settings:
        return num_results >= max(num_settings, 1)
    weak = [name for name in names if is_weak_result(name)]
    return bool(weak) and (
        has_axis or ((has_source or any(map(is_held_out, weak))) and "rate" not in _kinds_of(weak[0]))
    )


def source_of(text: str) -> str:
    """Return what a text says that values were measured on: train, val, test, eval, or "" if it does not."""
    found = [match.lastgroup or "" for match in _SOURCES.finditer(text)]
    # `Evaluating train: `
    return next((source for source in found if source != "eval"), "".join(found[:1]))


def source_of_row(texts: Mapping[str, object]) -> str:
    """Return what the texts of a row say that its values were measured on; "" for the training."""
    source = next((source_of(text) for key in SPLIT_NAMES if isinstance(text := texts.get(key), str)), "")
    return "" if source == "train" else source


def is_source(word: str) -> bool:
    """Whether a word only says what was measured on."""
    return _SOURCES.fullmatch(word) is not None


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
        kept = words if len(words) == 1 else [word for word in words if word.lower() not in _FILLERS] or words
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
