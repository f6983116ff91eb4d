"""Figures as text."""

from rjax.bench.measure import Figure
from rjax.bench.table import default, line, lines

COPY = Figure("copy", 1024, "xla", None, 8, (1e-6,))
XLA = Figure("ema", 1024, "xla", None, 12, (4e-6, 2e-6, 3e-6))
SLOW, FAST = (
    Figure("ema", 1024, "mosaic_gpu", block, 12, (seconds,))
    for block, seconds in ((128, 2e-6), (256, 1.5e-6))
)


def cells(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_an_op_is_one_line_with_the_best_block():
    found = list(lines([COPY, XLA, FAST, SLOW], lambda op, n: f"{op}{n}"))
    assert len({len(row) for row in found}) == 1
    assert [cells(row) for row in found] == [
        ["op", "n", "xla us", "mosaic us", "xla GB/s", "mosaic GB/s", "xla/copy",
         "mosaic/copy", "block", "default"],
        ["-" * len(cell) for cell in cells(found[1])],
        ["copy", "2^10", "1.00", "", "8.2", "", "100%", "", "", "copy1024"],
        ["ema", "2^10", "3.00", "1.50", "4.1", "8.2", "50%", "100%", "256", "ema1024"],
    ]  # fmt: skip


def test_columns_without_anything_are_left_out():
    header, _, row = lines([XLA])
    assert header == "| op  |    n | xla us | xla GB/s | default |"
    assert row == "| ema | 2^10 |   3.00 |      4.1 | xla     |"


def test_without_a_table_the_default_is_xla():
    assert default("ema", 1024) == "xla" and default("copy", 1024) == ""


def test_a_figure_is_a_line():
    assert line(XLA) == "ema, 2^10, xla: 3.00 us, 4.1 GB/s"
    assert line(SLOW) == "ema, 2^10, mosaic_gpu 128: 2.00 us, 6.1 GB/s"
