"""What a run says while it goes on: plain lines, and a live bar on a terminal."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from rjax.runs.errors import NO_ROOM, UsageError


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
            self._task = self._bar.add_task("compiling", total=total_steps)

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
            say(text)
            return
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def between(self, text: str) -> None:
        """Print `text` where no bar shows it anyway."""
        if self._bar is None:
            self.line(text)

    def status(self, text: str, steps: int = 0) -> None:
        """Show `text` beside the bar, and move it by `steps`."""
        if self._bar is not None:
            self._bar.update(self._task, advance=steps, description=text)


def say(text: str) -> None:
    """Print `text` to standard output at once.

    Raises:
        UsageError: if that has no room for it.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        # What is still in the buffer would be tried again at the end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UsageError(
            f"standard output cannot take more ({error.strerror}): send it elsewhere"
        ) from error


def describe_progress(
    epoch: tuple[int, int], step: tuple[int, int], facts: Mapping[str, Any]
) -> str:
    """Return one line about an epoch: loss, accuracy, rate, scale, skips and speed.

    Args:
        epoch: its number from 1, and how many there are.
        step: how many steps of it are done, and how many it has.
        facts: means and last values over those steps.

    Example:
        >>> facts = dict(loss=0.25, accuracy=0.9375, learning_rate=0.1, scale=8192.0,
        ...     skipped=0, images_per_second=1234.5)
        >>> print(describe_progress((2, 30), (40, 40), facts)[:47])
        epoch  2/30  loss 0.2500  accuracy 93.75 %  lr
        >>> print(describe_progress((2, 30), (7, 40), facts)[:37])
        epoch  2/30  step  7/40  loss 0.2500
    """
    parts = [_part("epoch", *epoch)]
    if step[0] < step[1]:
        parts.append(_part("step", *step))
    return "  ".join(
        [
            *parts,
            f"loss {facts['loss']:.4f}",
            f"accuracy {percent(facts['accuracy'])}",
            f"lr {facts['learning_rate']:.3g}",
            f"scale {facts['scale']:.10g}",
            f"skipped {facts['skipped']}",
            f"{facts['images_per_second']:,.0f} img/s",
        ]
    )


def describe_status(epoch: tuple[int, int], facts: Mapping[str, Any]) -> str:
    """Return what a bar has room for beside it.

    Example:
        >>> facts = dict(loss=0.25, accuracy=0.9375, scale=8192.0, skipped=0)
        >>> describe_status((2, 30), facts)
        'epoch  2/30 loss 0.2500 acc 93.75 % scale 8192 skipped 0'
    """
    return (
        f"{_part('epoch', *epoch)} loss {facts['loss']:.4f} "
        f"acc {percent(facts['accuracy'])} scale {facts['scale']:.10g} "
        f"skipped {facts['skipped']}"
    )


def describe_evaluation(name: str, which: str, values: Mapping[str, Any]) -> str:
    """Return one line about an evaluation.

    Example:
        >>> describe_evaluation("test", "ema", dict(loss=0.1, accuracy=0.98, count=359))
        '  test set, 359 images, ema: loss 0.1000  accuracy 98.00 %'
    """
    return (
        f"  {name} set, {values['count']:,} images, {which}: "
        f"loss {values['loss']:.4f}  accuracy {percent(values['accuracy'])}"
    )


def percent(share: float) -> str:
    """Return a share in per cent, with two decimals."""
    return f"{100 * share:.2f} %"


def _part(name: str, number: int, total: int) -> str:
    return f"{name} {number:{len(str(total))}d}/{total}"


def _bar() -> Any:
    # Imported here so that output without a terminal does not pay for it.
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=10),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        transient=True,  # the last line is the result, not the bar
    )
