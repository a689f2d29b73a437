"""Names of the input pipelines. Separate from the schema because the journal uses them without pydantic."""

from __future__ import annotations

from typing import Literal

PipelineName = Literal["memory", "stream", "fixed"]

# The reason that the journal records for a pipeline set in the config; `engine.runs.bottleneck` compares it.
PIPELINE_FROM_CONFIG = "as data.pipeline says"
