"""What a run says while it goes on: plain lines, and a live bar on a terminal."""

import sys
from collections.abc import Mapping
from typing import Any


class Console:
    """Prints lines to standard output; on a terminal also a bar below them.

    Without a terminal only lines appear, at their full width, each flushed at once.

    Args:
        total_steps: what the bar counts up to.
    """

    def __init__(self, total_steps: int) -> None:
        self._bar: Any = None
        if sys.stdout.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("starting", total=total_steps)

    def __enter__(self) -> "Console":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def line(self, text: str = "") -> None:
        """Print `text` above the bar."""
        if self._bar is None:
            print(text, flush=True)
            return
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, steps: int, text: str) -> None:
        """Move the bar by `steps` and show `text` beside it."""
        if self._bar is not None:
            self._bar.update(self._task, advance=steps, description=text)


def describe_progress(epoch: int, epochs: int, facts: Mapping[str, Any]) -> str:
    """Return one line about an epoch: loss, accuracy, scale, skips and speed.

    Example:
        >>> describe_progress(2, 30, dict(loss=0.25, accuracy=0.9375, scale=8192.0,
        ...     skipped=0, images_per_second=1234.5))
        'epoch  2/30  loss 0.2500  accuracy 93.75 %  scale 8192  skipped 0  1,234 img/s'
    """
    width = len(str(epochs))
    return "  ".join(
        [
            f"epoch {epoch:{width}d}/{epochs}",
            f"loss {facts['loss']:.4f}",
            f"accuracy {facts['accuracy']:.2%}".replace("%", " %"),
            f"scale {facts['scale']:g}",
            f"skipped {facts['skipped']}",
            f"{facts['images_per_second']:,.0f} img/s",
        ]
    )


def _bar() -> Any:
    # Imported here so that output without a terminal does not pay for it.
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=20),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        transient=True,  # the last line is the result, not the bar
    )
