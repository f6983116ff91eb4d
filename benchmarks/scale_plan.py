"""A plan for scale: bytes and time of a data-parallel step over 8, 64, 1024 devices.

Arithmetic on rjax's plans alone: nothing is run, and every time but those of one device
is predicted. Gradients are averaged in float32 in two buckets (`G_DEEP_CONV`, then the
rest), over a ring; with a sharded optimizer they are scattered once and the half copies
gathered. The deep bucket can hide behind what the backward pass still has to do after
its last gradient; everything else comes after the backward pass.

    PYTHONPATH=. python benchmarks/scale_plan.py [--figure FILE.png]
        [--measured ResNet-50=34.2,VGG16-BN=57.9,VGG16-BN:sharded=58.8] [--devices 2]
        [--bus 300] [--per-norm 4]

`--measured` puts steps of `--devices` devices, in milliseconds, beside what is
predicted for them at NVLink's bandwidth, or at that of `--bus`, in GB/s, with
`--per-norm` exchanges of every norm, forward and backward.
"""

import argparse
from collections.abc import Iterator

from scaling.cost import LINKS, Link, hidden_from, predict
from scaling.models import Model, all_models
from scaling.picture import COUNTS, draw


def table(rows: list[list[str]]) -> Iterator[str]:
    """Yield rows as Markdown, the first as the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        cells = [c.ljust(w) for c, w in zip(row, widths, strict=True)]
        yield f"| {' | '.join(cells)} |"
        if i == 0:
            yield f"|{'|'.join('-' * (w + 2) for w in widths)}|"


def models_table(models: list[Model]) -> Iterator[str]:
    """Yield what the models are, by their plans."""
    rows = [
        ["model", "parameters", "batch a device", "optimizer", "ms alone", "deep MB",
         "rest MB", "window ms", "norms"]
    ]  # fmt: skip
    for m in models:
        rest = m.grad_bytes - m.deep_bytes
        rows.append(
            [m.name, f"{m.parameters / 1e6:,.1f} M", m.batch, m.optimizer,
             f"{m.step_ms:.1f}", f"{m.deep_bytes / 1e6:,.1f}", f"{rest / 1e6:,.1f}",
             f"{m.window_ms:.2f}", str(m.norms)]
        )  # fmt: skip
    yield from table(rows)
    yield ""
    for m in models:
        yield f"- {m.name}: the step of one device is {m.source}."


def memory_table(models: list[Model]) -> Iterator[str]:
    """Yield the gigabytes of state that a device holds, by the plans."""
    counts = ["1", *map(str, COUNTS)]
    rows = [["state, GB a device", "whole", *(f"sharded over {n}" for n in counts[1:])]]
    for m in models:
        shards = [f"{m.state_bytes(n, True) / 1e9:.2f}" for n in COUNTS]
        rows.append([m.name, f"{m.state_bytes(1, False) / 1e9:.2f}", *shards])
    yield from table(rows)


def times_table(models: list[Model]) -> Iterator[str]:
    """Yield the predicted steps, for every model, count and link."""
    rows = [
        ["model", "devices", "sharded", "GB sent a device"]
        + [f"{link.name}: ms waited, scaling" for link in LINKS]
    ]
    for m in models:
        for n in COUNTS:
            for shard in (False, True):
                steps = [predict(m, link, n, shard) for link in LINKS]
                cells = [f"{s.exposed:,.1f}, {s.efficiency:.0%}" for s in steps]
                moved = f"{steps[0].moved / 1e9:.3f}"
                rows.append([m.name, str(n), "yes" if shard else "", moved, *cells])
    yield from table(rows)


def hiding_table(models: list[Model]) -> Iterator[str]:
    """Yield from which bandwidth on a reduction would hide behind the backward pass."""
    hop = LINKS[1].hop
    rows = [
        ["model", "devices", "deep bucket, GB/s to hide", "all of it, if buckets "
         "followed the layers, GB/s"]
    ]  # fmt: skip
    for m in models:
        for n in COUNTS:
            deep = hidden_from(m.deep_bytes, m.window_ms, n, hop)
            # The backward pass is two thirds of a step, and gradients come all along.
            ideal = hidden_from(m.grad_bytes, 2 / 3 * m.step_ms, n, hop)
            rows.append([m.name, str(n), _rate(deep, m.deep_bytes), _rate(ideal, 1)])
    yield from table(rows)


def _rate(value: float, nbytes: float) -> str:
    if not nbytes:
        return "no deep bucket"
    return "never" if value == float("inf") else f"{value / 1e9:,.0f}"


def measured_table(models: list[Model], args: argparse.Namespace) -> Iterator[str]:
    """Yield predicted steps beside measured ones."""
    n, link = args.devices, Link("NVLink 4", args.bus * 1e9, LINKS[0].hop, "")
    measured = parse_measured(args.measured, models)
    rows = [
        ["model", "devices", "sharded", "ms predicted", "ms measured",
         "scaling predicted", "scaling measured", "waits predicted: deep, late, norms"]
    ]  # fmt: skip
    for (name, shard), ms in measured.items():
        m = next(m for m in models if m.name == name)
        s = predict(m, link, n, shard, args.per_norm)
        waits = f"{max(0, s.deep - m.window_ms):.2f}, {s.late:.2f}, {s.norms:.2f}"
        rows.append(
            [m.name, str(n), "yes" if shard else "", f"{s.step:.1f}", f"{ms:.1f}",
             f"{s.efficiency:.1%}", f"{m.step_ms / ms:.1%}", waits]
        )  # fmt: skip
    yield from table(rows)


def parse_measured(text: str, models: list[Model]) -> dict[tuple[str, bool], float]:
    """Return milliseconds by model and by whether the optimizer is sharded.

    Raises:
        ValueError: for what is no NAME=MS, or no model.
    """
    found = {}
    for word in filter(None, text.split(",")):
        label, _, value = word.partition("=")
        name, _, how = label.partition(":")
        if name not in (m.name for m in models):
            known = ", ".join(m.name for m in models)
            raise ValueError(f"--measured knows no {name!r}: use {known}")
        if how not in ("", "sharded"):
            raise ValueError(f"--measured takes NAME or NAME:sharded, got {label!r}")
        try:
            ms = float(value)
        except ValueError:
            raise ValueError(f"--measured takes NAME=MS, got {word!r}") from None
        if not 0 < ms < float("inf"):
            raise ValueError(f"--measured takes milliseconds above 0, got {word!r}")
        found[name, how == "sharded"] = ms
    return found


def lines(models: list[Model], args: argparse.Namespace) -> Iterator[str]:
    """Yield the whole plan as Markdown."""
    yield "All of it is arithmetic, simulated and not measured, unless it says so."
    yield ""
    for part in (models_table, memory_table, times_table, hiding_table):
        yield from part(models)
        yield ""
    for link in LINKS:
        yield (
            f"- {link.name}: {link.bandwidth / 1e9:g} GB/s in each direction "
            f"({link.source}), {link.hop * 1e6:g} µs a hop (assumed)."
        )
    if args.measured:
        yield ""
        yield from measured_table(models, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--figure", help="draw weak scaling into this PNG")
    parser.add_argument("--measured", default="", metavar="NAME=MS,…")
    parser.add_argument("--devices", type=int, default=2, help="that were measured")
    parser.add_argument("--bus", type=float, default=450.0, help="GB/s, measured")
    parser.add_argument("--per-norm", type=int, help="exchanges, when measured")
    args = parser.parse_args()
    if args.devices < 2 or not 0 < args.bus < float("inf"):
        parser.error("--devices must be at least 2, and --bus above 0")
    models = all_models()
    try:
        print("\n".join(lines(models, args)))
    except ValueError as error:
        parser.error(str(error))
    if args.figure:
        draw(models, args.figure)


if __name__ == "__main__":
    main()
