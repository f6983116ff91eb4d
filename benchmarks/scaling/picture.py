"""The picture of the plan for scale: weak scaling against the bandwidth of a link."""

from typing import Any

import numpy as np

from scaling.cost import LINKS, Link, predict
from scaling.models import Model

COUNTS = (8, 64, 1024)
HOP = 5e-6


def draw(models: list[Model], path: str) -> None:
    """Draw one panel a model into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 2, figsize=(11, 8), sharex=True, sharey=True)
    for axes, model in zip(grid.flat, models, strict=True):
        _panel(axes, model)
    for axes in grid[-1]:
        axes.set_xlabel("bandwidth of a link, GB/s in each direction")
    for axes in grid[:, 0]:
        axes.set_ylabel("one device's time / predicted time")
    figure.suptitle(
        f"Weak scaling, predicted: a ring of {HOP * 1e6:g} µs a hop; simulated, not "
        "measured"
    )
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=6, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axes: Any, model: Model) -> None:
    bandwidths = np.geomspace(1, 1000, 200)
    for i, devices in enumerate(COUNTS):
        for shard, style in ((False, "-"), (True, "--")):
            found = [
                predict(model, Link("", 1e9 * b, HOP, ""), devices, shard).efficiency
                for b in bandwidths
            ]
            label = f"{devices}" + (" sharded" if shard else " devices")
            axes.plot(bandwidths, found, style, color=f"C{i}", label=label)
    for link in LINKS:
        axes.axvline(link.bandwidth / 1e9, color="0.8", zorder=0)
        axes.text(
            link.bandwidth / 1e9, 1.02, link.name, color="0.4", fontsize=7, ha="center"
        )
    axes.set_xscale("log")
    axes.set_ylim(0, 1.08)
    axes.axhline(0.95, color="0.6", linestyle=":", zorder=0)
    axes.set_title(
        f"{model.name}: {model.batch} a device, {model.step_ms:.0f} ms alone",
        fontsize=10,
    )
