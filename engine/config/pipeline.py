"""Names of input pipelines. Not in the schema: the journal uses them without pydantic."""

from __future__ import annotations

from typing import Literal

PipelineName = Literal["memory", "stream", "fixed"]
