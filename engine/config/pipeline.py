"""The input pipelines by name. Apart from the schema because the journal needs them without pydantic."""

from __future__ import annotations

from typing import Literal

PipelineName = Literal["memory", "stream", "fixed"]


# Why a run takes a pipeline that its config names.
PIPELINE_FROM_CONFIG = "as data.pipeline says"
