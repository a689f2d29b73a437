"""Every reason to refuse a run that can be found before its ranks start, computed once for all front ends.

`launcher` and `external` call `run_preflight` before they claim the run folder, and
`preflight_process` for the form. None of it imports torch: the ranks find what only a built model shows.

Before the dataset is opened, `with_input_keys` resolves the input keys of section `data` that are not set, and the
precision of a resumed run. A run with pretrained weights takes the input transform of the weights, a resumed one
that of its first session.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pydantic import ValidationError

from engine.base.errors import Problem, UsageError, collect_problems, raise_if_any
from engine.base.host import has_bfloat16_instructions
from engine.base.libraries import training_problem
from engine.config.conflicts import config_conflicts
from engine.config.data_sections import DataConfig
from engine.config.effects import NoEffect, keys_without_effect_on_devices, optimizer_keys_without_effect
from engine.config.loader import resolve_config
from engine.config.precision import AmpChoice, choose_amp
from engine.config.resume import find_changes, immutable_key_problems
from engine.config.rules import cpu_precision_warnings
from engine.config.schema import Config, as_dict
from engine.config.training_sections import TIMM_PREFIX
from engine.config.user_code import check_user_code
from engine.gpus.device_preview import preview_devices
from engine.gpus.selection import CudaDevice, NotFreeError
from engine.jobs.launch.request import RunRequest, check_dependencies, limit_problems
from engine.jobs.launch.supervise import requeue_warnings
from engine.jobs.notify.run_messages import notify_problems
from engine.jobs.queue.place import fixed_terms
from engine.runs.checkpoint_files import list_checkpoints
from engine.runs.event_lines import DataDownload
from engine.runs.folder import RunFolder
from engine.runs.journal import find_session_problem
from engine.runs.ownership import check_claim
from engine.runs.recorder import Listener
from engine.train.data.checks import build_sampler_from_counts, check_source, dataset_warnings, sampler_problems
from engine.train.data.inspection_process import ImageCounts, check_user_data_code, find_item_format
from engine.train.data.plan import choose_pipeline
from engine.train.data.sources.base import ImageSource
from engine.train.data.sources.builtin import TORCHVISION_DATASETS
from engine.train.data.sources.open import open_downloaded_source, open_source_for_preflight
from engine.train.distributed.node_plan import NodePlan, plan_node
from engine.train.distributed.rank_env import RankInfo
from engine.train.distributed.rendezvous import check_rendezvous
from engine.train.models.catalog import resolve_model_source
from engine.train.models.pretrained_input import (
    INPUT_KEYS,
    describe_pretrained_input,
    find_pretrained_input,
    needs_items,
    with_pretrained_input,
)
from engine.train.models.weights_file import weights_problems
from engine.train.optim.lr_schedule import schedule_length_problems
from engine.train.optim.timm_optimizers import timm_optimizer_problems, timm_options


def with_input_keys(request: RunRequest) -> RunRequest:
    """Return a request with the input keys that its pretrained weights, or the run that it resumes, supply, and with
    the precision of the latter.

    Keys that cannot be resolved stay unset; the preflight reports why."""
    config, folder = request.config, request.resumed_folder
    if folder is not None and (saved := saved_config(folder)) is not None:
        return replace(request, config=_with_saved_precision(_with_saved_input(config, saved), saved))
    try:
        pretrained = find_pretrained_input(config.model)
        if pretrained is None:
            return request
        items = None
        if needs_items(config) and not request.problems:
            # The code of the dataset runs.
            request.code_trust.check(config)
            items = find_item_format(config)
            if items.is_float:
                return request
        config = with_pretrained_input(config, pretrained, items)
    except UsageError:
        return request
    return replace(request, config=config, input_source=describe_pretrained_input(config, pretrained))


def saved_config(folder: RunFolder) -> Config | None:
    """Return the config of a run; None if it has none. Raises UsageError if it cannot be read."""
    # Only compared: no code that it names runs.
    return resolve_config(str(folder.config), trust_code=True).config if folder.config.exists() else None


def _with_saved_precision(config: Config, saved: Config) -> Config:
    """Set `precision.amp` to the level that the run began with, if it is auto and other keys permit that level."""
    if config.precision.amp != "auto":
        return config
    resumed = config.with_values(precision={"amp": saved.precision.amp})
    return config if any(config_conflicts(resumed)) else resumed


def _with_saved_input(config: Config, saved: Config) -> Config:
    """Set the input keys that are not set to those of the run."""
    if "pretrained" not in (config.model.weights, saved.model.weights):
        return config
    values = saved.data.model_dump(mode="json", include={*INPUT_KEYS}, exclude_none=True)
    unset = {key: value for key, value in values.items() if getattr(config.data, key) is None}
    try:
        checked = DataConfig.model_validate({**config.data.model_dump(mode="json", exclude_unset=True), **unset})
    except ValidationError:
        return config
    return config.model_copy(update={"data": checked})


# Choose the GPUs of this host, none for the CPU; the argument is whether to wait for them. Raises UsageError.
ChooseGpus = Callable[[bool], Sequence[CudaDevice]]


@dataclass
class Preflight:
    """The problems and warnings of a run request, and what the preflight learned for the ranks.

    `warnings` are those of the request, and of keys that have no effect on these devices. `source` and `counts` are
    None if the dataset was not opened, `plan` if no devices could be chosen. `amp` is the level of `precision.amp` on
    the devices of the plan. `batch_size` replaces the default of `data.batch_size` where the training images do not
    fill a step of it."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    source: ImageSource | None = None
    counts: ImageCounts | None = None
    plan: NodePlan | None = None
    amp: AmpChoice = field(default_factory=lambda: AmpChoice("off"))
    batch_size: int | None = None

    def chosen(self, config: Config) -> Config:
        """Return a config with the level of `precision.amp` and the batch size that the preflight chose."""
        batch_size = config.data.batch_size if self.batch_size is None else self.batch_size
        return config.with_values(data={"batch_size": batch_size}, precision={"amp": self.amp.level})

    @property
    def accepted_plan(self) -> NodePlan:
        """The plan of a run without problems. Raises UsageError for any other."""
        if self.plan is None:
            raise UsageError(self.problems)
        return self.plan

    def use_plan(self, plan: NodePlan, config: Config) -> None:
        """Set the plan, and the level of `precision.amp` on its devices."""
        self.plan, self.amp = plan, choose_amp(config, plan.capability, on_gpu=plan.on_gpu)


def source_opener(listener: Listener) -> Callable[[Config], ImageSource | None]:
    """Return a function that downloads the dataset of a run if it is missing, and opens it."""

    def open_source(config: Config) -> ImageSource | None:
        return open_downloaded_source(config, lambda message: listener(DataDownload(message=message)))

    return open_source


def run_preflight(
    request: RunRequest,
    choose_gpus: ChooseGpus,
    rank_info: RankInfo | None = None,
    open_source: Callable[[Config], ImageSource | None] = open_source_for_preflight,
    after_wait: Callable[[Config], Config] = lambda config: config,
) -> Preflight:
    """Check a run request on this host, and return all problems together.

    `after_wait` returns the config for what is checked once the run has its GPUs.
    `rank_info` is set for a rank that an external launcher started: the first rank of each host checks the host, the
    others only their data and devices, and rank 0 also checks the run folder."""
    if (problem := training_problem()) is not None:
        return Preflight([*request.problems, problem])
    config, preflight = request.config, Preflight()
    first_of_host = rank_info is None or rank_info.local_rank == 0
    if first_of_host:
        _check_host(request, preflight.problems, rank_info)
    # On all ranks, which scan a large folder at the same time.
    with collect_problems(preflight.problems):
        preflight.source = open_source(config)
        if preflight.source is not None:
            preflight.counts = ImageCounts(preflight.source.num_images("train"), preflight.source.num_images("val"))
        elif config.data.dataset in TORCHVISION_DATASETS:
            preflight.counts = ImageCounts(*TORCHVISION_DATASETS[config.data.dataset].counts)
    gpus, devices_known = list[CudaDevice](), True
    # A request that is refused anyway does not queue for GPUs, nor do ranks of torchrun and srun.
    waits = config.waits and rank_info is None
    wait = waits and not (request.problems or preflight.problems)
    try:
        gpus = list(choose_gpus(wait))
        config = after_wait(config)
    except UsageError as error:
        devices_known = False
        preflight.problems += [] if waits and isinstance(error, NotFreeError) else error.problems
    try:
        sizes = (None, None) if rank_info is None else (rank_info.local_world_size, rank_info.world_size)
        plan = plan_node(config, gpus, *sizes)
        preflight.use_plan(plan, config)
        preflight.plan = plan if devices_known else None
        if first_of_host:
            world_size = plan.local_world_size if rank_info is None else rank_info.world_size
            _check_plan(config, preflight, plan, world_size, devices_known=devices_known)
            known_plan = plan if devices_known else None
            preflight.warnings += _keys_without_effect(request, rank_info, known_plan, world_size)
            preflight.warnings += _find_warnings(config, preflight)
    except UsageError as error:
        # If no GPU could be chosen, the limits of the CPU do not matter.
        preflight.problems += error.problems if devices_known else []
    invalid_keys = {problem.location for problem in request.problems}
    # `request.config` holds the defaults of the keys whose values are invalid.
    valid = [problem for problem in preflight.problems if problem.location not in invalid_keys]
    preflight.problems = [*request.problems, *valid]
    return preflight


def _keys_without_effect(
    request: RunRequest, rank_info: RankInfo | None, plan: NodePlan | None, world_size: int
) -> list[Problem]:
    """Return the warnings of the request, and of keys without effect on this host. `plan` is None if its devices are
    not known yet."""
    config, found = request.config, list[NoEffect]()
    if config.optim.name.startswith(TIMM_PREFIX):
        # A problem of its name is reported by `_check_host`.
        with suppress(UsageError):
            found += optimizer_keys_without_effect(config, timm_options(config.optim.name))
    if plan is not None:
        external = rank_info is not None
        found += keys_without_effect_on_devices(
            config, request.typed, world_size, on_gpu=plan.on_gpu, external=external
        )
    return list(dict.fromkeys([*request.warnings, *(part.warning for part in found), *requeue_warnings(config)]))


def find_problems(request: RunRequest, rank_info: RankInfo | None = None) -> list[Problem]:
    """Return all problems that a run would have now, without holding its GPUs or waiting for them."""
    config = request.config

    def preview(_wait: bool) -> Sequence[CudaDevice]:
        return preview_devices(config.device.gpus, fixed_terms(config), wait=config.waits)

    return run_preflight(with_input_keys(request), preview, rank_info).problems


def _check_host(request: RunRequest, problems: list[Problem], rank_info: RankInfo | None) -> None:
    """Check what does not depend on the number of ranks: model, user code, optimizer and run folder."""
    config = request.config
    with collect_problems(problems):
        resolve_model_source(config.model)
    with collect_problems(problems):
        # First, because the second imports the code.
        request.code_trust.check(config)
        problems += check_user_code(config)
    if not config.run.resume:
        problems += weights_problems(config)
    problems += timm_optimizer_problems(config.optim)
    if rank_info is None:
        with collect_problems(problems):
            check_rendezvous(config.device.init_method, os.environ)
        with collect_problems(problems):
            check_dependencies(request)
        problems += limit_problems(request)
    else:
        reason = "is not available under torchrun and srun; start the run with gputrain"
        keys = [f"queue.{name}" for name in ("after", "begin", "time_limit") if getattr(config.queue, name)]
        keys += ["run.snapshot"] if config.run.snapshot else []
        problems += [Problem(key, reason, code="not-supported") for key in keys]
    if request.lr_range is None and (rank_info is None or rank_info.rank == 0):
        with collect_problems(problems):
            _check_run_folder(request)
        if not (config.run.resume or config.run.requeue):
            problems += notify_problems(config)


def _check_run_folder(request: RunRequest) -> None:
    """Raises UsageError if the run folder cannot be created, or the run in it cannot be resumed with this config."""
    is_resumed = request.resumed_folder is not None
    folder = check_claim(request.runs_dir, request.config.run.name, resume=is_resumed, trust_owner=request.trust_owner)
    if folder is not None:
        check_resumed_config(request.config, folder)


def check_resumed_config(config: Config, folder: RunFolder) -> None:
    """Raises UsageError, before GPUs are reserved, if the journal of the run in `folder` has another format, or the
    config changes an immutable key of the run.

    `engine.train.loop.resume` repeats this on the ranks with the checkpoint that they load. It alone decides if
    `config.yaml` was edited since: the file does not say any more what the run began with."""
    if (problem := find_session_problem(folder.journal)) is not None:
        advice = "use the version of gputrain that wrote it, or use a new name with --name to start a new run"
        raise UsageError.one(str(folder.journal), problem, advice, code="wrong-version")
    saved, newest = saved_config(folder), list_checkpoints(folder.checkpoints)[:1]
    if saved is None or any(checkpoint.stat().st_mtime < folder.config.stat().st_mtime for checkpoint in newest):
        return
    raise_if_any(immutable_key_problems(find_changes(as_dict(saved), config)))


def _check_plan(config: Config, preflight: Preflight, plan: NodePlan, world_size: int, *, devices_known: bool) -> None:
    """Check what depends on the number of ranks: batches, schedule and input pipeline."""
    problems = preflight.problems
    # The ranks report it if only they open the dataset.
    if config.data.pipeline == "memory" and preflight.source is not None:
        with collect_problems(problems):
            choose_pipeline(config, preflight.source, plan.local_world_size)
    _check_batches(config, preflight, plan, world_size)
    if not problems:
        # Last, because the errors of the user's code would be misleading while other values are invalid.
        with collect_problems(problems):
            # A batch size that does not fit is reported, or reduced, by `_check_batches`.
            user_counts = check_user_data_code(config.with_values(data={"batch_size": 1}), world_size)
            if preflight.counts is None and user_counts is not None:
                preflight.counts = user_counts
                _check_batches(config, preflight, plan, world_size)


def _find_warnings(config: Config, preflight: Preflight) -> list[Problem]:
    """Return what the run is allowed to do, although the user may not have meant it."""
    warnings = list[Problem]()
    if preflight.plan is not None and not preflight.plan.on_gpu:
        warnings += cpu_precision_warnings(config, has_bfloat16=has_bfloat16_instructions())
    if preflight.source is not None:
        warnings += dataset_warnings(config, preflight.source)
    if preflight.batch_size is not None and preflight.counts is not None:
        reason = f"the default of {config.data.batch_size} is reduced to {preflight.batch_size}"
        reason += f" because there are only {preflight.counts.train} training images"
        advice = "set a smaller number for more steps per epoch"
        warnings.append(Problem("data.batch_size", reason, advice, code="too-large"))
    return warnings


def _check_batches(config: Config, preflight: Preflight, plan: NodePlan, world_size: int) -> None:
    """Check that the data fits the batch size, the number of ranks and the schedule."""
    if preflight.counts is None:
        return
    preflight.batch_size = _reduced_batch_size(config, preflight.counts.train, plan, world_size)
    # The search for the largest batch size that fits never leaves an epoch without a step.
    batch_size = 1 if config.data.batch_size == "auto" else preflight.batch_size
    sampler = build_sampler_from_counts(
        config if batch_size is None else config.with_values(data={"batch_size": batch_size}),
        preflight.counts.train,
        preflight.counts.val,
        world_size,
        devices_per_rank=plan.devices_per_rank,
    )
    if preflight.source is None:
        preflight.problems += sampler_problems(sampler)
    else:
        with collect_problems(preflight.problems):
            check_source(config, preflight.source, sampler)
    if sampler.steps_per_epoch:
        preflight.problems += schedule_length_problems(config.schedule, sampler.steps_per_epoch, config.run.epochs)


def _reduced_batch_size(config: Config, train_images: int, plan: NodePlan, world_size: int) -> int | None:
    """Return the largest batch size per device that fills a step, if the default is larger; None if it fits, and for a
    batch size that is set."""
    if "batch_size" in config.data.model_fields_set or not config.data.drop_last:
        return None
    largest = train_images // (world_size * plan.devices_per_rank * config.optim.accumulate)
    return largest if 0 < largest < config.data.numeric_batch_size else None
