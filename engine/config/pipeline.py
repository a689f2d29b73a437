"""Names of the input pipelines. Separate from the schema because the journal uses them without pydantic."""

from __future__ import annotations

from typing import Literal

PipelineName = Literal["memory", "stream", "fixed"]
