"""Which fields the form shows, and what its rows say about their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tui.form.fields import ConfigField, FormSection, is_relevant, optimizer_placeholders
from tui.form.model import Form
from tui.widgets.field_lines import FieldRow, Heading

GPUS_KEY, RANKS_KEY = "device.gpus", "device.ranks"


@dataclass(frozen=True)
class KnownFacts:
    """What the checks found out: `errors` and `facts` by key, and the name that the run gets if none is typed."""

    errors: Mapping[str, str]
    facts: Mapping[str, str]
    run_name: str
    no_gpus: bool


def field_rows(
    sections: Sequence[FormSection], form: Form, known: KnownFacts, query: str, *, show_all: bool
) -> list[FieldRow | Heading]:
    """Return the fields that contain `query` or, without one, that take effect with the current values.

    Without `show_all`, fields that are neither main fields nor changed nor wrong are left out."""
    values = form.values()
    on_cpu = known.no_gpus or values[GPUS_KEY] == "cpu"
    placeholders = optimizer_placeholders(values["optim.name"]) | {"run.name": known.run_name}

    def is_shown(info: ConfigField) -> bool:
        key = info.key
        if query:
            return any(query in text.lower() for text in (key, info.label, info.description))
        shown = info.is_main or show_all or key in form.overrides or key in known.errors
        return shown and is_relevant(key, values) and (key != RANKS_KEY or on_cpu)

    rows: list[FieldRow | Heading] = []
    for section in sections:
        infos = [info for info in section.fields if is_shown(info)]
        rows += [Heading(section.title)] if infos else []
        rows += [
            FieldRow(
                info,
                values[info.key],
                placeholders.get(info.key, ""),
                known.facts.get(info.key, ""),
                known.errors.get(info.key, ""),
                info.key in form.overrides,
            )
            for info in infos
        ]
    return rows
