"""What of a config can be found impossible before anything of a run is made, and without torch: all of it at once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from engine.config.loader import ConfigError
from engine.config.rules import sync_bn_problems
from engine.config.schema import Config
from engine.config.user_code import check_user_code
from engine.data.batching import build_sampler, check_source
from engine.data.inspection_process import check_user_data_code
from engine.data.pipelines.choose import pipeline_problems
from engine.data.sources.base import ImageSource
from engine.data.sources.open import open_source_for_preflight
from engine.distributed.node_plan import NodePlan, plan_node
from engine.distributed.rendezvous import check_rendezvous
from engine.gpus.allocation import allocate_devices
from engine.launch.batch_size import with_batch_size
from engine.models.catalog import check_model_name
from engine.models.weights_file import weights_problems
from engine.optim.lr_schedule import schedule_length_problems
from engine.optim.timm_optimizers import timm_optimizer_problems
from engine.utils.errors import Problem, UsageError, collect_problems


@dataclass
class Preflight:
    """The source of the images where it can be had without torch, and what is wrong so far."""

    source: ImageSource | None = None
    problems: list[Problem] = field(default_factory=list)


def run_preflight(config: Config) -> Preflight:
    """At the model's name, code of the user's own, the optimizer and the data."""
    preflight = Preflight()
    with collect_problems(preflight.problems):
        check_model_name(config.model)
    preflight.problems += check_user_code(config)
    if not config.run.resume:
        preflight.problems += weights_problems(config)
    preflight.problems += timm_optimizer_problems(config.optim)
    with collect_problems(preflight.problems):
        check_rendezvous(config.device.init_method, os.environ)
    with collect_problems(preflight.problems):
        preflight.source = open_source_for_preflight(config)
    return preflight


def check_run_plan(config: Config, preflight: Preflight, run_plan: NodePlan) -> None:
    """At what hangs on the number of ranks. Raises UsageError with all that was found."""
    preflight.problems += sync_bn_problems(config, run_plan.local_world_size, on_gpu=run_plan.on_gpu)
    preflight.problems += pipeline_problems(config, preflight.source, run_plan.local_world_size)
    if preflight.source is not None:
        least = with_batch_size(config, 1) if config.data.batch_size == "auto" else config
        sampler = build_sampler(
            least, preflight.source, run_plan.local_world_size, devices_per_rank=run_plan.devices_per_rank
        )
        with collect_problems(preflight.problems):
            check_source(config, preflight.source, sampler)
        if sampler.steps_per_epoch:
            preflight.problems += schedule_length_problems(config.schedule, sampler.steps_per_epoch, config.run.epochs)
    if not preflight.problems:
        # Makes images with the user's code, which only then means something.
        check_user_data_code(config, run_plan.local_world_size)
    if preflight.problems:
        raise UsageError(preflight.problems)


def with_all_problems(error: UsageError) -> UsageError:
    """The same refusal of a config, with what else would have been refused had its values been valid."""
    if not isinstance(error, ConfigError):
        return error
    told = {problem.location for problem in error.problems}
    found = run_preflight(error.valid_part).problems
    with collect_problems(found):
        allocation = allocate_devices(error.valid_part.device.gpus, "", wait=False, on_wait=lambda _: None)
        allocation.reservation.release()
        plan_node(error.valid_part, allocation.devices)
    return UsageError([*error.problems, *(problem for problem in found if problem.location not in told)])
