"""Choose the input pipeline and the decoder of a run on rank 0, for all ranks.

`engine.training.train` calls it. What the choice depends on differs between the ranks: free memory, the installed
libraries, and measured rates.
"""

from __future__ import annotations

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
from engine.distributed.messages import decide_on_rank_0
from engine.distributed.rank_env import RankInfo
from engine.training.job import Job
from engine.utils.answers import Answer
from engine.utils.codec import Record
from engine.utils.errors import UsageError


class InputChoice(Record, frozen=True, kw_only=True):
    """The input pipeline and the decoder of a run."""

    pipeline: PipelineChoice
    decoder: DecoderChoice


def choose_input(
    job: Job, source: ImageSource, recorded: DecoderName | None, rank_info: RankInfo, store: Store
) -> InputChoice:
    """Choose the pipeline, and the decoder unless it must be measured. `recorded` is the decoder of the checkpoint.

    Raises UsageError on all ranks.
    """

    def choose() -> InputChoice:
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
        return InputChoice(pipeline=pipeline, decoder=decoder)

    return decide_on_rank_0("pipeline", choose, Answer[InputChoice], rank_info, store)


def settle_decoder(
    pipeline: InputPipeline, request: BatchRequest, device: torch.device, rank_info: RankInfo, store: Store
) -> None:
    """Measure the decoders on the images of a request if the config has not decided, and check that nvJPEG works.

    The loader processes may wait for it. Raises UsageError, on a single rank if nvJPEG works on the others.
    """
    if pipeline.decoder_choice.decoder is None:
        kind = Answer[DecoderChoice]
        pipeline.set_decoder(
            decide_on_rank_0("decoder", lambda: pipeline.measure_decoders(request, device), kind, rank_info, store)
        )
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
