"""`gputrain data`: classes and images of a dataset before training."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tui.cli.command import command
from tui.cli.config_arguments import ConfigArguments, code_trust, print_no_effect, resolve_arguments
from tui.cli.config_flags import FlagOverrides, config_flags
from tui.cli.console import print_json, print_warning
from tui.cli.options import ForceOption, JsonOption, TrustCodeOption, output_option

if TYPE_CHECKING:
    from PIL.Image import Image


@command(
    [
        "gputrain data flowers.yaml",
        "gputrain data flowers.yaml --augmented -o sheet.png",
        "gputrain data --data-path ~/photos",
        "gputrain data pack ~/photos -o shards",
    ]
)
@config_flags("model", "dataset", "data_path", "image_size")
def show(
    *,
    arguments: ConfigArguments = None,
    flags: FlagOverrides,
    augmented: Annotated[
        bool, typer.Option("--augmented", help="Show training images with the augmentation of the config.")
    ] = False,
    output: Annotated[str | None, output_option("a PNG file of the images.")] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
    trust_code: TrustCodeOption = False,
) -> None:
    """Show classes and images of a dataset before training.

    Prints the number of images of each class, sizes and modes of the image files, and skipped files. On a terminal, or
    with -o, also shows images of each class as the network sees them.
    """
    from engine.utils.files import expand_user
    from engine.utils.output_file import check_output

    path = expand_user(output) if output is not None else None
    if path is not None:
        check_output(path, "images.png", force=force)
    resolved = resolve_arguments(arguments, flags, trust_code=trust_code)
    print_no_effect(resolved)
    keys = ("model.name", "data.dataset", *(("augment.transform",) if augmented else ()))
    code_trust(resolved, granted=trust_code).check(resolved.config, keys)
    # Imports torch, so only after the checks that need none.
    from engine.data.batching import check_dataset, dataset_warnings
    from engine.doctor.dataset import contact_sheet, open_dataset

    opened = open_dataset(resolved.config)
    shows = not as_json and sys.stdout.isatty()
    if as_json:
        print_json(opened.to_dict())
    else:
        from tui.tables.dataset import dataset_lines

        typer.echo("\n".join(dataset_lines(opened)))
    for warning in dataset_warnings(opened.config, opened.source):
        print_warning(warning)
    check_dataset(opened.config, opened.source)
    if path is None and (not shows or opened.image_format.is_float):
        return
    sheet = contact_sheet(opened, augmented=augmented)
    if path is not None:
        _write_png(sheet, path)
        typer.echo(f"wrote {path}", err=True)
    if shows:
        show_picture(sheet)


def _write_png(sheet: Image, path: Any) -> None:
    """Raises UsageError."""
    from engine.utils.errors import UsageError
    from engine.utils.files import replace_file

    try:
        replace_file(path, lambda file: sheet.save(file, "PNG"))
    except OSError as error:
        reason = f"{path} cannot be written: {error.strerror or error}"
        raise UsageError.one("--output", reason, code="not-writable") from error


def show_picture(picture: Image) -> None:
    """Draw a picture on the terminal, as wide as that."""
    from rich.console import Console
    from rich.segment import Segment, Segments

    from tui.pictures import draw_picture

    console = Console()
    # As wide as the terminal, however high: the text above scrolls.
    columns = max(console.width - 1, 1)
    drawn = draw_picture(picture, columns, -(-picture.height * columns // (2 * picture.width)))
    for line in drawn.lines:
        console.print(Segments([*line, Segment.line()]), end="")
