"""Figures as text: a line each as they come, a table at the end."""

from collections.abc import Callable, Iterator, Sequence

from rjax.bench.measure import Figure, size_name
from rjax.ops import mosaic, tuned

_HEADER = (
    "op", "n", "xla us", "mosaic us", "xla GB/s", "mosaic GB/s", "xla/copy",
    "mosaic/copy", "block", "default",
)  # fmt: skip


def line(figure: Figure) -> str:
    """Return one figure as a line.

    Example:
        >>> print(line(Figure("ema", 1024, "mosaic_gpu", 256, 12, (2e-6,))))
        ema, 2^10, mosaic_gpu 256: 2.00 us, 6.1 GB/s
    """
    block = f" {figure.block}" if figure.block else ""
    return (
        f"{figure.op}, {size_name(figure.n)}, {figure.implementation}{block}: "
        f"{1e6 * figure.seconds:.2f} us, {figure.bandwidth / 1e9:.1f} GB/s"
    )


def default(op: str, n: int) -> str:
    """Return the implementation that serves where none is named; "" for the copy."""
    if op == "copy":
        return ""
    kernel = mosaic.why_not() is None and tuned.prefers_kernel(op, n)
    return "mosaic_gpu" if kernel else "xla"


def lines(
    figures: Sequence[Figure], default: Callable[[str, int], str] = default
) -> Iterator[str]:
    """Yield a Markdown table: one op and size a line, the kernel at its best block.

    Columns in which nothing stands are left out. The shares are those of the copy's
    bandwidth at the same size. Small arrays fit into the second-level cache, where a
    share may exceed 1: it compares like with like.

    Args:
        figures: what was measured.
        default: from op and number of elements to what the last column says.
    """
    rows = [_HEADER, *_rows(figures, default)]
    kept = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in kept]
    for i, row in enumerate(zip(*kept, strict=True)):
        padded = [
            cell.ljust(width) if title in ("op", "default") else cell.rjust(width)
            for cell, width, (title, *_) in zip(row, widths, kept, strict=True)
        ]
        yield f"| {' | '.join(padded)} |"
        if i == 0:
            yield f"|{'|'.join('-' * (width + 2) for width in widths)}|"


def _rows(
    figures: Sequence[Figure], default: Callable[[str, int], str]
) -> Iterator[tuple[str, ...]]:
    best: dict[tuple[str, int, str], Figure] = {}
    for figure in sorted(figures, key=lambda figure: -figure.seconds):
        best[figure.op, figure.n, figure.implementation] = figure
    for op, n in dict.fromkeys((figure.op, figure.n) for figure in figures):
        copy = best.get(("copy", n, "xla"))
        pair = [best.get((op, n, name)) for name in ("xla", "mosaic_gpu")]
        share = lambda f: f"{f.bandwidth / copy.bandwidth:.0%}" if copy else ""  # noqa: B023, E731
        cells = [
            show(figure) if figure else ""
            for show in (
                lambda f: f"{1e6 * f.seconds:.2f}",
                lambda f: f"{f.bandwidth / 1e9:.1f}",
                share,
            )
            for figure in pair
        ]
        kernel = pair[1]
        block = str(kernel.block) if kernel and kernel.block else ""
        yield op, size_name(n), *cells, block, default(op, n)
