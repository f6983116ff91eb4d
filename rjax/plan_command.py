"""`rjax plan`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from rjax import drawing
from rjax.files import write_atomically
from rjax.runs.console import say
from rjax.runs.errors import UsageError
from rjax.runs.options import PlanOptions
from rjax.runs.setup import prepare_plan

_File = Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]


@dataclasses.dataclass(frozen=True)
class PictureOptions:
    """How the layout is told beside the table.

    Attributes:
        svg: Draw the arenas into this file too.
    """

    svg: _File = None


@dataclasses.dataclass(frozen=True)
class PlanCommand(PlanOptions):
    """Print where a model's parameters lie, without training it."""

    picture: PictureOptions = PictureOptions()


def run_plan(options: PlanCommand) -> int:
    """Print the layout, draw it if asked, return the exit code.

    Raises:
        UsageError: for bad input, or if the picture cannot be written.
    """
    plan = prepare_plan(options)
    say(plan.table())
    file = options.picture.svg
    if file is not None:
        try:
            write_atomically(Path(file), drawing.page_svg(plan))
        except OSError as error:
            raise UsageError(
                f"--svg {file} cannot be written ({error.strerror}): give another file"
            ) from error
    return 0
