"""What of a config can be found impossible before anything of a run is made, and without torch: all of it at once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from engine.config.loader import ConfigError
from engine.config.rules import sync_bn_problems
from engine.config.schema import Config
from engine.config.user_code import check_own
from engine.data.batching import check_source, shares_of
from engine.data.inspection_process import check_own_data
from engine.data.pipelines.choose import pipeline_problems
from engine.data.sources.base import Source
from engine.data.sources.open import open_early
from engine.distributed.node_plan import Plan, plan
from engine.distributed.rendezvous import check_meeting_point
from engine.gpus.allocation import choose
from engine.launch.batch_size import with_batch
from engine.models.catalog import check_model_name
from engine.models.weights_file import weights_problems
from engine.optim.lr_schedule import unreachable
from engine.optim.timm_optimizers import check_timm_optimizer
from engine.utils.errors import Problem, UsageError, collecting


@dataclass
class Early:
    """The source of the images where it can be had without torch, and what is wrong so far."""

    source: Source | None = None
    problems: list[Problem] = field(default_factory=list)


def look_early(config: Config) -> Early:
    """At the model's name, code of the user's own, the optimizer and the data."""
    early = Early()
    with collecting(early.problems):
        check_model_name(config.model)
    early.problems += check_own(config)
    if not config.run.resume:
        early.problems += weights_problems(config)
    early.problems += check_timm_optimizer(config.optim)
    with collecting(early.problems):
        check_meeting_point(config.device.init_method, os.environ)
    with collecting(early.problems):
        early.source = open_early(config)
    return early


def look_at_shares(config: Config, early: Early, share: Plan) -> None:
    """At what hangs on the number of ranks. Raises UsageError with all that was found."""
    early.problems += sync_bn_problems(config, share.ranks, on_gpu=share.on_gpu)
    early.problems += pipeline_problems(config, early.source, share.ranks)
    if early.source is not None:
        least = with_batch(config, 1) if config.data.batch_size == "auto" else config
        shares = shares_of(least, early.source, share.ranks, devices_a_rank=share.devices_a_rank)
        with collecting(early.problems):
            check_source(config, early.source, shares)
        if shares.steps_per_epoch:
            early.problems += unreachable(config.schedule, shares.steps_per_epoch, config.run.epochs)
    if not early.problems:
        # Makes images with the user's code, which only then means something.
        check_own_data(config, share.ranks)
    if early.problems:
        raise UsageError(early.problems)


def with_all_problems(error: UsageError) -> UsageError:
    """The same refusal of a config, with what else would have been refused had its values been valid."""
    if not isinstance(error, ConfigError):
        return error
    told = {problem.where for problem in error.problems}
    found = look_early(error.valid_part).problems
    with collecting(found):
        choice = choose(error.valid_part.device.gpus, "", wait=False, waiting=lambda _: None)
        choice.reservation.release()
        plan(error.valid_part, choice.devices)
    return UsageError([*error.problems, *(problem for problem in found if problem.where not in told)])
