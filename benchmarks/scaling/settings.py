"""What weak scaling is measured of: the options of the script as plain data."""

import argparse
import dataclasses
from typing import Any

from throughput import settings as throughput

# Who takes part: one device, all of them, all with a sharded optimizer, and all with
# norms that look at the share of their own device.
PARTS = ("one", "all", "sharded", "local")


@dataclasses.dataclass(frozen=True)
class Settings(throughput.Settings):
    """One model, how it is trained, and by whom; `batch` is that of one device.

    Attributes:
        parts: some of `PARTS`, with commas.
    """

    parts: str = "one,all,sharded"


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of the script."""
    parser = argparse.ArgumentParser(description=description)
    add, default = parser.add_argument, Settings()
    models = ", ".join(throughput.MODELS)
    add("--model", default="resnet50,vgg16bn", help=f"of {models}, with commas")
    add("--parts", default=default.parts, help=f"of {', '.join(PARTS)}, with commas")
    add("--precision", choices=throughput.PRECISIONS, default=default.precision)
    add("--batch", type=int, default=default.batch, help="images a device")
    for name in ("image", "classes", "steps", "samples", "warmup", "seed"):
        add(f"--{name}", type=int, default=getattr(default, name))
    add("--learning-rate", type=float, default=default.learning_rate)
    add("--ema", action="store_true", help="keep an average of the weights")
    add("--folded", action="store_true", help="rjax.nn.ResNet50(folded=True)")
    add("--profile", action="store_true", help="when the buckets are reduced, too")
    add("--no-memory", action="store_true", help="no processes for the memory")
    add("--timeout", type=int, default=600, help="seconds a process may take")
    add("--json", help="keep all samples here, one process a line")
    add("--only", help=argparse.SUPPRESS)  # the child: one job, one JSON line
    return parser


def settings_of(args: argparse.Namespace, model: str) -> Settings:
    """Return the settings for one model.

    Raises:
        ValueError: for a number out of range, or a part that is none.
    """
    args = argparse.Namespace(**vars(args), learn=0)
    checked = throughput.settings_of(args, model)
    parts = throughput.chosen("--parts", args.parts, PARTS)
    if not parts:
        raise ValueError(f"--parts names none of {', '.join(PARTS)}")
    values: dict[str, Any] = dataclasses.asdict(checked)
    return Settings(**{**values, "parts": ",".join(parts)})
