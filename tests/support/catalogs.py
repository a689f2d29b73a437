"""Fill the cache of the tests with the catalogs of torchvision and timm, in this process.

The product builds each catalog in a process that imports its library, and each xdist worker may build them all.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engine.base import libraries
from engine.base.codec import decode, encode
from engine.base.files import exclusive_lock
from engine.train.models import catalog
from engine.train.optim import timm_optimizers


class AnswerOfHelper:
    """The pipe of a helper that runs in this process: it holds the request and the answer."""

    def __init__(self, request: object) -> None:
        self.request = request

    def receive(self, kind: type[Any]) -> Any:
        return decode(encode(self.request), kind)

    def send(self, answer: object) -> None:
        self.answer = encode(answer)


def request_in_process(module: str, kind: type[Any], request: object = None) -> Any:
    pipe = AnswerOfHelper(request)
    import_module(module).main(pipe)
    return decode(pipe.answer, kind)


def fill_catalogs(folder: Path) -> None:
    """Fill the cache unless another worker did. `folder` is that of all workers.

    A test run that does not import timm leaves it to the product, which builds only the catalogs that are read.
    """
    if "timm" not in sys.modules:
        return
    filled = folder / "catalogs"
    with (
        exclusive_lock(filled.with_suffix(".lock")),
        patch.object(libraries, "ask_helper", request_in_process),
    ):
        if filled.exists():
            return
        for source in ("torchvision", "timm"):
            catalog.read_listing(source)
        timm_optimizers.timm_options("timm:lamb")
        filled.touch()
