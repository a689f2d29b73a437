"""Choose the input pipeline and the decoder of a run on rank 0, for all ranks.

`engine.training.train` calls it. What the choice depends on differs between the ranks: free memory, the installed
libraries, and measured rates.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed import Store

from engine.config.pipeline import DecoderName
from engine.data.pipelines.choose import PipelineChoice, choose_pipeline
from engine.data.pipelines.choose_decoder import DecoderChoice, choose_decoder
from engine.data.pipelines.gpu_decoder import DecoderUnavailableError, check_nvjpeg
from engine.data.pipelines.input_pipeline import InputPipeline
from engine.data.sampler import BatchRequest
from engine.data.sources.base import ImageSource
from engine.data.sources.formats import model_input_format
from engine.distributed.rank_env import RankInfo
from engine.distributed.rendezvous import get_from_rank
from engine.training.job import Job
from engine.utils.errors import Problem, UsageError, problems_from_json, problems_to_json


def choose_input(
    job: Job, source: ImageSource, recorded: DecoderName | None, rank_info: RankInfo, store: Store
) -> tuple[PipelineChoice, DecoderChoice]:
    """Choose the pipeline, and the decoder unless it must be measured. `recorded` is the decoder of the checkpoint.

    Raises UsageError on all ranks.
    """

    def choose() -> dict[str, Any]:
        config = job.config
        pipeline = choose_pipeline(config, source, job.plan.local_world_size)
        decoder = choose_decoder(
            config,
            source,
            model_input_format(config, source),
            pipeline.pipeline,
            on_gpu=job.plan.on_gpu,
            recorded=recorded,
        )
        return {"pipeline": asdict(pipeline), "decoder": asdict(decoder)}

    chosen = _choose_on_rank_0("pipeline", choose, rank_info, store)
    return PipelineChoice(**chosen["pipeline"]), DecoderChoice(**chosen["decoder"])


def settle_decoder(
    pipeline: InputPipeline, request: BatchRequest, device: torch.device, rank_info: RankInfo, store: Store
) -> None:
    """Measure the decoders on the images of a request if the config has not decided, and check that nvJPEG works.

    The loader processes may wait for it. Raises UsageError, on a single rank if nvJPEG works on the others.
    """
    if pipeline.decoder_choice.decoder is None:
        chosen = _choose_on_rank_0(
            "decoder", lambda: asdict(pipeline.measure_decoders(request, device)), rank_info, store
        )
        pipeline.set_decoder(DecoderChoice(**chosen))
        # What the measurement used is not what training needs.
        torch.cuda.empty_cache()
    if pipeline.decoder_choice.decoder == "gpu":
        try:
            check_nvjpeg(device)
        except DecoderUnavailableError as error:
            advice = "set data.decoder=cpu, or install a torchcodec that fits torch and the driver"
            raise UsageError.one(
                "data.decoder", f"gpu is impossible: {error}", advice, code="library-failed"
            ) from error


def _choose_on_rank_0(
    key: str, choose: Callable[[], dict[str, Any]], rank_info: RankInfo, store: Store
) -> dict[str, Any]:
    """Return the choice of rank 0, which sends it to the others under `key`. Raises UsageError on all ranks."""
    if rank_info.rank != 0:
        received: dict[str, Any] = json.loads(get_from_rank(store, 0, key))
        if "refused" in received:
            raise UsageError(problems_from_json(received["refused"]))
        return received
    failure = Problem("", f"rank 0 could not choose a {key}", code="rank-failed")
    message: dict[str, Any] = {"refused": problems_to_json([failure])}
    try:
        message = choose()
        return message
    except UsageError as error:
        message = {"refused": problems_to_json(error.problems)}
        raise
    finally:
        store.set(key, json.dumps(message))
