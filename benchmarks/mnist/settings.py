"""What is trained: the recipe `mnist-mlp`, and what the script may change of it."""

import argparse
import dataclasses
from typing import Any

from rjax.runs.options import TrainOptions, flat, with_values
from rjax.runs.recipes import RECIPES

PEERS = ("torch", "torch-reduce-overhead", "torch-eager")
RECIPE = flat(RECIPES["mnist-mlp"])


@dataclasses.dataclass(frozen=True)
class Settings:
    """Runs of one contender.

    Attributes:
        contender: "rjax" or one of `PEERS`.
        data_dir: folder with the files of MNIST.
        epochs: of every run; the schedule spans them.
        seeds: one run each.
        batch: images a step.
        hidden: widths of the hidden layers.
        warmup_epochs: in which the rate rises.
    """

    contender: str
    data_dir: str
    epochs: int = RECIPE["epochs"]
    seeds: tuple[int, ...] = (0, 1, 2)
    batch: int = RECIPE["batch_size"]
    hidden: tuple[int, ...] = RECIPE["hidden"]
    warmup_epochs: float = RECIPE["warmup_epochs"]

    def options(self, seed: int) -> TrainOptions:
        """Return the options of `rjax train` for one run, without a record."""
        return with_values(
            RECIPES["mnist-mlp"],
            data_dir=self.data_dir,
            epochs=self.epochs,
            batch_size=self.batch,
            hidden=self.hidden,
            warmup_epochs=self.warmup_epochs,
            seed=seed,
            record_every=0,
        )


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of the script."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--data-dir", help="folder with the four files of MNIST")
    add("--epochs", type=int, default=RECIPE["epochs"])
    add("--seeds", default="0,1,2", help="one run each, with commas")
    add("--peers", default="torch", help=f"of {', '.join(PEERS)}, with commas")
    add("--no-rjax", action="store_true", help="measure peers alone")
    add("--batch", type=int, default=RECIPE["batch_size"])
    add("--hidden", default=",".join(map(str, RECIPE["hidden"])))
    add("--warmup-epochs", type=float, default=RECIPE["warmup_epochs"])
    add("--timeout", type=int, default=3600, help="seconds a run may take")
    add("--json", help="keep all samples here, one contender a line")
    add("--only", help=argparse.SUPPRESS)  # the child: one contender, one JSON line
    return parser


def settings_of(args: argparse.Namespace) -> list[Settings]:
    """Return the settings of every contender, rjax first.

    Raises:
        ValueError: for an option that cannot be.
    """
    if not args.data_dir:
        raise ValueError("--data-dir is needed: the folder with the files of MNIST")
    for name in ("epochs", "batch", "timeout"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    names = [] if args.no_rjax else ["rjax"]
    for name in filter(None, args.peers.split(",")):
        if name not in PEERS:
            raise ValueError(f"--peers knows no {name!r}: use {', '.join(PEERS)}")
        names.append(name)
    if not names:
        raise ValueError("nothing is left to measure: name a peer or drop --no-rjax")
    if not 0 <= args.warmup_epochs < args.epochs:
        raise ValueError(
            f"--warmup-epochs {args.warmup_epochs:g} leaves nothing of {args.epochs}: "
            "give fewer, or more --epochs"
        )
    common: dict[str, Any] = {
        "data_dir": args.data_dir,
        "epochs": args.epochs,
        "seeds": _numbers("--seeds", args.seeds, 0),
        "batch": args.batch,
        "hidden": _numbers("--hidden", args.hidden, 1),
        "warmup_epochs": args.warmup_epochs,
    }
    return [Settings(contender=name, **common) for name in names]


def _numbers(option: str, text: str, least: int) -> tuple[int, ...]:
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < least:
        raise ValueError(
            f"{option} must be whole numbers from {least} up, with commas between, "
            f"got {text!r}"
        )
    return found


def from_json(head: dict[str, Any]) -> Settings:
    """Return the settings that `dataclasses.asdict` and JSON made plain."""
    lists = {k: tuple(v) for k, v in head.items() if isinstance(v, list)}
    return Settings(**{**head, **lists})
