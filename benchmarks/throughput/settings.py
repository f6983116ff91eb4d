"""What is measured: the options of the script as plain data, and the one batch."""

import argparse
import dataclasses
import math
from typing import Any

import numpy as np

MODELS = ("resnet50", "vgg16bn", "resnet20")
PEERS = ("torch", "torch-compile", "torch-compile-max", "flax")
PRECISIONS = ("fp16", "bf16", "fp32")
IMPLEMENTATIONS = ("xla", "mosaic_gpu")
# The same for every contender, each in its own idiom.
MOMENTUM, WEIGHT_DECAY, SMOOTHING, SCALE, EMA = 0.9, 1e-4, 0.1, 8192.0, 0.999


@dataclasses.dataclass(frozen=True)
class Settings:
    """One model and how it is trained and timed.

    Attributes:
        model: one of `MODELS`.
        batch: images a step.
        image: height and width.
        classes: logits.
        precision: one of `PRECISIONS`.
        learning_rate: constant; the peak of a schedule where the model has to learn.
        ema: whether an average of the weights is kept.
        steps: steps in one sample.
        samples: samples that are timed.
        warmup: steps after the first one, before any sample.
        seed: of batch and weights.
        folded: whether rjax's ResNet-50 folds 1x1 convolutions into their norms.
        learn: steps of the learning check, 0 to measure instead.
        profile: whether some steps are profiled after the samples.
    """

    model: str = "resnet50"
    batch: int = 256
    image: int = 224
    classes: int = 1000
    precision: str = "fp16"
    learning_rate: float = 0.01
    ema: bool = False
    steps: int = 20
    samples: int = 5
    warmup: int = 5
    seed: int = 0
    folded: bool = False
    learn: int = 0
    profile: bool = False


def make_batch(settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Return images [batch, height, width, 3] and labels [batch], from the seed alone.

    The images are float16 values, kept as float32 unless the precision is fp16: every
    precision can represent them or rounds them itself.
    """
    rng = np.random.default_rng(settings.seed)
    shape = (settings.batch, settings.image, settings.image, 3)
    images = rng.standard_normal(shape, np.float32).astype(np.float16)
    labels = rng.integers(settings.classes, size=settings.batch, dtype=np.int32)
    half = settings.precision == "fp16"
    return images if half else images.astype(np.float32), labels


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of the script."""
    parser = argparse.ArgumentParser(description=description)
    add, default = parser.add_argument, Settings()
    add("--model", default=default.model, help=f"of {_words(MODELS)}, with commas")
    add("--peers", default="torch,torch-compile,flax", help=_words(PEERS))
    add("--implementation", default="", help=f"also rjax by {_words(IMPLEMENTATIONS)}")
    add("--no-rjax", action="store_true", help="leave out rjax as it comes")
    add("--precision", choices=PRECISIONS, default=default.precision)
    for name in ("batch", "image", "steps", "samples", "warmup", "seed"):
        add(f"--{name}", type=int, default=getattr(default, name))
    add("--classes", type=int, default=default.classes)
    add("--learning-rate", type=float, default=default.learning_rate)
    add("--ema", action="store_true", help="keep an average of the weights")
    add("--folded", action="store_true", help="rjax.nn.ResNet50(folded=True)")
    add("--profile", action="store_true", help="where the time of a step goes (jax)")
    add("--learn", type=int, nargs="?", const=200, default=0, metavar="STEPS",
        help="train rjax on a task that can be learned, beside fp32")  # fmt: skip
    add("--timeout", type=int, default=600, help="seconds a contender may take")
    add("--json", help="keep all samples here, one contender a line")
    add("--only", help=argparse.SUPPRESS)  # the child: one contender, one JSON line
    return parser


def settings_of(args: argparse.Namespace, model: str) -> Settings:
    """Return the settings for one model.

    Raises:
        ValueError: for a number out of range.
    """
    for name in ("batch", "image", "classes", "steps", "samples", "timeout"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, got {getattr(args, name)}")
    for name in ("warmup", "seed", "learn"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name} must not be negative, got {vars(args)[name]}")
    if args.learn and args.precision == "fp32":
        raise ValueError("--learn compares with fp32: use --precision fp16 or bf16")
    if args.folded and model != "resnet50":
        raise ValueError(f"--folded is for resnet50, got --model {model}: leave it out")
    rate = args.learning_rate
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"--learning-rate must be a finite number > 0, got {rate}")
    names = [field.name for field in dataclasses.fields(Settings)]
    values: dict[str, Any] = {name: getattr(args, name) for name in names}
    values["model"] = model
    return Settings(**values)


def chosen(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    """Return the names in a list with commas, each once.

    Raises:
        ValueError: for a name that is none.
    """
    words = list(
        dict.fromkeys(word.strip() for word in text.split(",") if word.strip())
    )
    for word in words:
        if word not in known:
            raise ValueError(f"{option} knows no {word!r}: use {_words(known)}")
    return words


def contenders(args: argparse.Namespace) -> list[str]:
    """Return the names of all contenders, rjax first.

    Raises:
        ValueError: for a name that is none, or if none is left.
    """
    names = [] if args.no_rjax else ["rjax"]
    for name in chosen("--implementation", args.implementation, IMPLEMENTATIONS):
        names.append(f"rjax[{name}]")
    names += chosen("--peers", args.peers, PEERS)
    if not names:
        raise ValueError("nothing is left to measure: name a peer or drop --no-rjax")
    return names


def _words(names: tuple[str, ...]) -> str:
    return ", ".join(names)
