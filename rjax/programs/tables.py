"""What a compiled step holds and runs, as tables: text in a terminal, HTML in Jupyter.

Both are read from the program, not guessed: XLA's text names the stage that every
instruction came from, and XLA's planner says what it allocates.
"""

import dataclasses
import html
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rjax import displays
from rjax.drawing import readable
from rjax.inflight import STAGES
from rjax.programs.hlo import Instruction, Program

OUTSIDE = "(no stage)"


@dataclasses.dataclass(frozen=True)
class StageRow:
    """What one stage, or several in the same kernels, run in a step.

    Attributes:
        stages: names in the order of the pipeline; empty for what has no stage's name.
        kernels: kernels, copies and library calls that a step runs; a loop counts as
            often as it is known to run, and a conditional by the branch that moves
            the most.
        nbytes: bytes that they read and write, as their operands and results say.
    """

    stages: tuple[str, ...]
    kernels: int
    nbytes: int

    @property
    def name(self) -> str:
        """Return the stages joined by "+", or "(no stage)"."""
        return " + ".join(self.stages) or OUTSIDE


@dataclasses.dataclass(frozen=True)
class StageTable:
    """The kernels of a step by the stage they belong to.

    Attributes:
        rows: every stage of the pipeline, in order; then one row for each set of stages
            that share kernels; last what has no stage's name.
    """

    rows: tuple[StageRow, ...]

    @property
    def kernels(self) -> int:
        """Return how many kernels, copies and library calls a step runs."""
        return sum(row.kernels for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Return the bytes that they read and write."""
        return sum(row.nbytes for row in self.rows)

    def _cells(self) -> list[tuple[str, ...]]:
        rows = [(r.name, f"{r.kernels:,}", readable(r.nbytes)) for r in self.rows]
        return [*rows, ("all", f"{self.kernels:,}", readable(self.nbytes))]

    def __str__(self) -> str:
        return text_table(("stage", "kernels", "moved"), self._cells())

    def _repr_html_(self) -> str:
        return displays.headed("stages", self.summary, self.table())

    @property
    def summary(self) -> str:
        """Return how much there is, in a few words."""
        kernels = displays.count(self.kernels, "kernel")
        return f"{kernels}, {readable(self.nbytes)} moved"

    def table(self) -> str:
        """Return the rows as HTML."""
        return html_table(("stage", "kernels", "moved"), self._cells())


def stage_table(program: Program) -> StageTable:
    """Return the kernels of a program by stage."""
    counts: dict[tuple[str, ...], list[int]] = {(name,): [0, 0] for name in STAGES}
    spans: dict[tuple[str, ...], list[int]] = {}
    for instruction, times in program.launched():
        stages = _stages(program.fused(instruction))
        row = (counts if stages in counts else spans).setdefault(stages, [0, 0])
        row[0] += times
        row[1] += times * program.moved(instruction)
    outside = spans.pop((), [0, 0])
    ordered = [*counts.items(), *sorted(spans.items(), key=_by_order), ((), outside)]
    return StageTable(tuple(StageRow(key, *row) for key, row in ordered))


def _stages(instructions: Iterable[Instruction]) -> tuple[str, ...]:
    found = {stage for i in instructions for stage in _of_path(i.path)}
    return tuple(name for name in STAGES if name in found)


def _of_path(path: str) -> list[str]:
    """Return the stage that a path names, or those that run as one, in a row."""
    outside = itertools.dropwhile(lambda part: part not in STAGES, path.split("/"))
    return list(itertools.takewhile(lambda part: part in STAGES, outside))


def _by_order(item: tuple[tuple[str, ...], Any]) -> list[int]:
    return [STAGES.index(name) for name in item[0]]


@dataclasses.dataclass(frozen=True)
class MemoryTable:
    """The bytes that a compiled step needs, as XLA reports them, and what they hold.

    Attributes:
        state: {field of the state: bytes}, without fields that are `None`.
        batch: bytes of the batch.
        report: bytes of what a step returns beside the new state, which takes the
            place of the old one.
        temporaries: bytes that XLA plans for everything between: activations,
            gradients, masks; regions F, T and S_MASK.
        code: bytes of the program itself, where XLA says.
    """

    state: Mapping[str, int]
    batch: int
    report: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """Return the bytes a step needs at once, its code left out."""
        return sum(self.state.values()) + self.batch + self.report + self.temporaries

    def _cells(self) -> list[tuple[str, ...]]:
        rows = [(f"state.{name}", n) for name, n in self.state.items()]
        rows += [("batch", self.batch), ("report", self.report)]
        rows += [("temporaries (XLA)", self.temporaries), ("all", self.peak)]
        return [(name, f"{n:,}", readable(n)) for name, n in rows]

    def __str__(self) -> str:
        return text_table(("memory", "bytes", ""), self._cells())

    def _repr_html_(self) -> str:
        return displays.headed("memory", self.summary, self.table())

    @property
    def summary(self) -> str:
        """Return how much there is, in a few words."""
        return f"{readable(self.peak)} a call"

    def table(self) -> str:
        """Return the rows as HTML."""
        return html_table(("memory", "bytes", ""), self._cells())


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned text: the first column left, the others right."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    rule = "-" * max(map(len, text))
    return "\n".join([text[0], rule, *text[1:-1], rule, text[-1]])


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as an HTML table for a light and a dark page."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag} style='text-align:{'right' if i else 'left'}'>"
            f"{html.escape(cell)}</{tag}>"
            for i, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{line(header, 'th')}</tr></thead>"
    return f"<table>{head}<tbody>{body}</tbody></table>"
