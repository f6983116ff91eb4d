"""Draw what `train_throughput.py --json` has kept: speed, memory, where the time goes.

    python benchmarks/throughput_plot.py FILE [FILE ...] --plot PNG

A row for every model: images a second of each contender, a bar to the median and a dot
for every sample; peak memory; milliseconds a step by kind of kernel, of those that were
profiled. A contender that is in the files more than once is drawn each time. Of runs
with `--learn`: loss over the steps, in half precision and in float32.
"""

import argparse
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from throughput.table import Record, speeds

KINDS = {
    "conv": "convolutions", "norm": "norms", "norm+pool": "norms with pooling",
    "pool": "pooling", "update": "update", "other": "other",
}  # fmt: skip
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#bbbbbb")
OURS, PEERS = "#88aadd", "#bbbbbb"


def read(paths: Sequence[str]) -> list[Record]:
    """Return the records of files, without those that failed.

    Raises:
        ValueError: for a file that holds none.
    """
    found = []
    for path in paths:
        try:
            lines = pathlib.Path(path).read_text().splitlines()
            records = [json.loads(line) for line in lines if line]
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        kept = [r for r in records if "samples" in r or "losses" in r]
        if not kept:
            raise ValueError(f"{path} holds no record of train_throughput.py --json")
        found += kept
    return found


def label(record: Record) -> str:
    """Return the name of a contender, as it was made."""
    folded = record.get("folded") and record["contender"].startswith("rjax")
    return record["contender"] + (", folded" if folded else "")


def draw(records: Sequence[Record], path: str) -> None:
    """Draw records into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [(model, own) for model in dict.fromkeys(r["model"] for r in records)
            if (own := [r for r in records if r["model"] == model])]  # fmt: skip
    columns = 3 if any("losses" in r or "profiled" in r for r in records) else 2
    heights = [1.1 + 0.42 * len(own) for _, own in rows]
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(4.4 * columns, max(3.0, sum(heights) + 0.6)),
        squeeze=False, layout="constrained", height_ratios=heights,
    )  # fmt: skip
    for (model, own), (left, middle, *right) in zip(rows, axes, strict=True):
        timed = [r for r in own if "samples" in r]
        _speeds(left, timed, model)
        _memory(middle, timed)
        curves = [r for r in own if "losses" in r]
        for axis in right:
            if curves:
                _losses(axis, curves)
            else:
                _kinds(axis, [r for r in timed if "profiled" in r])
    first = records[0]
    size = f"batch {first['batch']}"
    if "image" in first:
        size += f", {first['image']}×{first['image']}, {first['precision']}"
    figure.suptitle(f"{first['device']}, jax {_jax(records)}: {size}", fontsize=11)
    figure.savefig(path, dpi=110)


def _jax(records: Sequence[Record]) -> str:
    versions = {r["versions"]["jax"] for r in records if "jax" in r["versions"]}
    return ", ".join(sorted(versions)) or "none"


def _bars(axis: Any, records: Sequence[Record], widths: Sequence[float]) -> None:
    colours = [OURS if r["contender"].startswith("rjax") else PEERS for r in records]
    places = range(len(records))
    axis.barh(places, widths, color=colours, height=0.6)
    axis.set_yticks(places, [label(r) for r in records])
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def _speeds(axis: Any, records: Sequence[Record], model: str) -> None:
    medians = [statistics.median(speeds(r)) for r in records]
    _bars(axis, records, medians)
    for place, record in enumerate(records):
        found = speeds(record)
        axis.plot(found, [place] * len(found), "k.", markersize=4)
    for place, value in enumerate(medians):
        axis.text(value * 0.02, place, f"{value:,.0f}", va="center", weight="bold")
    axis.set_title(model, loc="left", fontsize=11)
    axis.set_xlabel("images a second (median; dots: samples)")


def _memory(axis: Any, records: Sequence[Record]) -> None:
    peaks = [(r.get("peak_bytes") or 0) / 1e9 for r in records]
    _bars(axis, records, peaks)
    for place, value in enumerate(peaks):
        text = f"{value:.1f}" if value else "unknown"
        axis.text(max(peaks, default=1.0) * 0.02, place, text, va="center")
    axis.set_yticklabels([])
    axis.set_xlabel("peak memory, GB")


def _kinds(axis: Any, records: Sequence[Record]) -> None:
    if not records:
        axis.axis("off")
        return
    starts = [0.0] * len(records)
    for (kind, name), colour in zip(KINDS.items(), COLOURS, strict=True):
        widths = [r["profiled"]["ms"].get(kind, 0.0) for r in records]
        if any(widths):
            axis.barh(
                range(len(records)), widths, left=starts, color=colour, label=name,
                height=0.6,
            )  # fmt: skip
        starts = [a + b for a, b in zip(starts, widths, strict=True)]
    axis.set_yticks(range(len(records)), [label(r) for r in records])
    axis.invert_yaxis()
    axis.set_xlabel("ms of kernels a step")
    axis.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    axis.spines[["top", "right"]].set_visible(False)


def _losses(axis: Any, records: Sequence[Record]) -> None:
    for record, style in zip(records, ("-", "--", ":", "-."), strict=False):
        axis.plot(record["losses"], style, label=record["precision"], linewidth=1)
    axis.set_xlabel("step")
    axis.set_ylabel("loss")
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--plot", required=True, metavar="PNG")
    args = parser.parse_args(argv)
    try:
        draw(read(args.files), args.plot)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
