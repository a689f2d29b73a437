"""Config section `task`: what a model predicts for an image."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.config.section import Section

TaskName = Literal["classification", "multilabel", "regression"]


class TaskConfig(Section):
    """Section `task`: what the model predicts for an image."""

    name: TaskName = Field(
        "classification",
        title="task",
        description="Task: classification, multilabel or regression. classification predicts one class per image, "
        "multilabel any number of labels, regression one or several numbers.",
    )
