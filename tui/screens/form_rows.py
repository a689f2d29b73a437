"""Which fields the form shows, what its rows say about their values, and the GPUs to choose from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text
from textual.app import App

from engine.config.loader import presets
from engine.gpus.snapshot import Snapshot
from engine.report.table import fit
from tui.form.fields import NO_PRESET, ConfigField, FormSection, is_relevant, optimizer_placeholders
from tui.form.model import Form
from tui.screens.dialogs import MultiChoiceDialog
from tui.screens.phrases import common_name
from tui.screens.tables import styled
from tui.screens.tables.gpus import GpuRow, choice_columns, silence
from tui.screens.widgets.field_lines import FieldRow, Heading
from tui.screens.widgets.lines import KeyedRow
from tui.terminal.palette import MUTED

GPUS_KEY, RANKS_KEY = "device.gpus", "device.ranks"
# Columns of the line of a GPU, and of the frames and marks beside it in a narrow terminal.
GPU_LINE_COLUMNS, OTHER_COLUMNS = 70, 12


@dataclass(frozen=True)
class KnownFacts:
    """What the checks found out: `errors` and `facts` by key, and the name that the run gets if none is typed."""

    errors: Mapping[str, str]
    facts: Mapping[str, str]
    run_name: str
    no_gpus: bool


def field_rows(
    sections: Sequence[FormSection], form: Form, known: KnownFacts, query: str, *, show_all: bool, selected_key: str
) -> list[FieldRow | Heading]:
    """Return the fields that contain `query` or, without one, that take effect with the current values.

    Without `show_all`, fields that are neither main fields nor changed nor wrong are skipped, except the selected
    one: what is typed into it may equal its default for a moment."""
    values = form.values()
    placeholders = optimizer_placeholders(values["optim.name"]) | {"run.name": known.run_name}
    if query:
        sections = _found_sections(sections, query)
    else:
        on_cpu = known.no_gpus or values[GPUS_KEY] == "cpu"
        visible = form.overrides.keys() | known.errors.keys() | {selected_key}

        def is_shown(info: ConfigField) -> bool:
            shown = info.is_main or show_all or info.key in visible
            relevant = is_relevant(info.key, values) or info.key in known.errors
            return shown and relevant and (info.key != RANKS_KEY or on_cpu)

        sections = [FormSection(part.title, tuple(filter(is_shown, part.fields))) for part in sections]
    rows: list[FieldRow | Heading] = []
    for section in sections:
        rows += [Heading(section.title)] if section.fields else []
        rows += [
            FieldRow(
                info,
                values[info.key],
                placeholders.get(info.key, ""),
                known.facts.get(info.key, ""),
                known.errors.get(info.key, ""),
                info.key in form.overrides,
            )
            for info in section.fields
        ]
    return rows


def _found_sections(sections: Sequence[FormSection], query: str) -> list[FormSection]:
    """Return the fields with `query` in their label or key by section, then those with it in their description."""
    found, described = [], list[ConfigField]()
    for section in sections:
        named = [info for info in section.fields if query in info.label.lower() or query in info.key]
        described += [info for info in section.fields if info not in named and query in info.description.lower()]
        # The best match is the first field, to which enter goes.
        named.sort(key=lambda info: _distance(info, query))
        found.append(FormSection(section.title, tuple(named)))
    found.sort(key=lambda section: min((_distance(info, query) for info in section.fields), default=len(MATCHES)))
    return [*found, FormSection("In the description", tuple(described))]


MATCHES: tuple[Callable[[str, str], bool], ...] = (str.__eq__, str.startswith, str.__contains__)
"""How a label matches what is searched for, the best first."""


def _distance(info: ConfigField, query: str) -> int:
    """Return how far a label is from the text that is searched for: 0 if they are the same."""
    label = info.label.lower()
    return next((place for place, matches in enumerate(MATCHES) if matches(label, query)), len(MATCHES))


def gpu_choices(
    snapshot: Snapshot, value: str, width: int = GPU_LINE_COLUMNS
) -> tuple[list[KeyedRow], list[str], list[Text]]:
    """Return a row per GPU, the keys of those that `device.gpus` names by index or UUID, and the header of the rows."""
    gpus = [GpuRow(str(gpu.index), gpu) for gpu in snapshot.gpus]
    table = fit(choice_columns(gpus, with_names=common_name(snapshot) is None), gpus, width)
    lines = [table.line(row, None if row.gpu.state == "ok" else ("used_by", silence(row.gpu)[1])) for row in gpus]
    rows = [KeyedRow(row.label, styled(line)) for row, line in zip(gpus, lines, strict=True)]
    names = {name.strip() for name in value.split(",")}
    selected = [str(gpu.index) for gpu in snapshot.gpus if names & {str(gpu.index), gpu.uuid}]
    return rows, selected, [styled(table.header(MUTED))]


def ask_gpus(app: App[None], snapshot: Snapshot, value: str, use: Callable[[str], None]) -> None:
    """Choose the GPUs to train on; `value` is the current one of `device.gpus`. Pass another one to `use`."""
    rows, selected, header = gpu_choices(snapshot, value, min(app.size.width - OTHER_COLUMNS, GPU_LINE_COLUMNS))

    def answer(picked: list[str] | None) -> None:
        # A value such as `auto` selects no row, and stays as it is unless the selection is changed.
        if picked is not None and picked != selected:
            use(",".join(picked) or "cpu")

    name = common_name(snapshot)
    title = "GPUs to train on" if name is None else f"GPUs to train on: {name}"
    app.push_screen(MultiChoiceDialog(title, rows, selected, header), answer)


def picked_gpus(snapshot: Snapshot | None, picked_uuids: Collection[str]) -> str:
    """Return `device.gpus` for the GPUs that were picked on the monitor; empty without any, or if they have gone."""
    gpus = () if snapshot is None else snapshot.gpus
    return ",".join(str(gpu.index) for gpu in gpus if gpu.uuid in picked_uuids)


def preset_choices(base: str | None) -> tuple[str, ...]:
    """Return the presets, and the base of the form if it is another file."""
    return tuple(dict.fromkeys([NO_PRESET, *presets(), base or NO_PRESET]))
