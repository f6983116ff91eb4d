"""The options of `rjax plan` and `rjax train`, and what rjax makes of them."""

import dataclasses
import math
from typing import Any, Literal, TypeVar

import optax

import rjax
from rjax.runs.errors import UsageError

# A rate that suits each optimizer on the small sets served here.
LEARNING_RATES = {
    "sgd": 0.1,
    "momentum": 0.1,
    "nesterov": 0.1,
    "adam": 1e-3,
    "adamw": 1e-3,
    "lars": 1.0,
}


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Print where a model's parameters lie, without training it."""

    data: Literal["digits"] = "digits"
    """Data set; `digits` comes with scikit-learn."""
    model: Literal["mlp", "cnn"] = "mlp"
    """Model to train."""
    precision: Literal["fp16", "bf16", "fp32"] = "fp16"
    """Precision of the compute copy; masters are always float32."""
    optimizer: Literal["nesterov", "momentum", "sgd", "adam", "adamw", "lars"] = (
        "nesterov"
    )
    """Optimizer of the float32 masters."""
    learning_rate: float | None = None
    """Learning rate; without it, one that suits the optimizer."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Course of the learning rate over the applied steps."""
    weight_decay: float = 1e-4
    """Weight decay; biases and norms never decay."""
    ema_decay: float = 0.99
    """Decay of the moving average of the masters; 0 switches it off."""
    clip_norm: float | None = None
    """Bound on the global norm of the true gradient."""
    clip_value: float | None = None
    """Bound on every element of the true gradient."""
    loss_scale: float | None = None
    """First loss scale, halved on a skip; without it, 8192 for fp16 and off else."""
    accumulation_steps: int = 1
    """Micro-batches that a batch is split into."""
    seed: int = 0
    """Seed of the weights, the order of the data and the dropout."""


@dataclasses.dataclass(frozen=True)
class TrainOptions(PlanOptions):
    """Train a model; leave a manifest and a line of metrics per step in a folder."""

    epochs: int = 20
    """Passes over the training set."""
    batch_size: int = 32
    """Images per step."""
    out: str | None = None
    """Folder of the run, new or empty; without it, the next free one under `runs`."""
    plan: bool = True
    """Print the plan before training."""


Options = TypeVar("Options", bound=PlanOptions)


def fill_in(options: Options) -> Options:
    """Return `options` with every default that depends on another one resolved."""
    if options.learning_rate is not None:
        return options
    return dataclasses.replace(options, learning_rate=LEARNING_RATES[options.optimizer])


def check_options(options: PlanOptions) -> None:
    """Raise a `UsageError` that names the first option with an impossible value."""
    _positive(options, "accumulation_steps", "learning_rate", "clip_norm", "clip_value")
    _not_negative(options, "weight_decay", "ema_decay", "seed")
    if options.ema_decay >= 1:
        raise UsageError(
            f"--ema-decay must be below 1, got {options.ema_decay}: "
            "give a decay such as 0.99, or 0 to switch the average off"
        )
    if options.clip_norm is not None and options.clip_value is not None:
        raise UsageError("--clip-norm and --clip-value exclude each other: give one")
    if options.seed >= 2**32:
        raise UsageError(f"--seed must be below 2**32, got {options.seed}")
    if not isinstance(options, TrainOptions):
        return
    _positive(options, "epochs", "batch_size")
    if options.batch_size % options.accumulation_steps:
        raise UsageError(
            f"--batch-size {options.batch_size} does not split into "
            f"--accumulation-steps {options.accumulation_steps} equal parts: "
            "make it a multiple"
        )


def build_config(options: PlanOptions, total_steps: int) -> rjax.Config:
    """Return the pipeline's configuration; the schedule spans `total_steps`."""
    scaling = None
    if options.loss_scale is not None:
        scaling = rjax.scaling.halving(init=options.loss_scale)
    clip = None
    if options.clip_norm is not None:
        clip = rjax.Clip(norm=options.clip_norm)
    elif options.clip_value is not None:
        clip = rjax.Clip(value=options.clip_value)
    optimizer = getattr(rjax.optim, options.optimizer)
    return rjax.Config(
        precision=options.precision,
        scaling=scaling,
        optimizer=optimizer(weight_decay=options.weight_decay),
        learning_rate=_learning_rate(options, total_steps),
        clip=clip,
        ema=rjax.Ema(decay=options.ema_decay) if options.ema_decay else None,
        accumulation_steps=options.accumulation_steps,
    )


def build_model(options: PlanOptions, num_classes: int) -> Any:
    """Return the Linen module that `--model` names."""
    if options.model == "mlp":
        return rjax.nn.MLP(features=(256, 128), num_classes=num_classes)
    return rjax.nn.CNN(num_classes=num_classes)


def load_data(options: PlanOptions) -> rjax.data.Dataset:
    """Return the data set that `--data` names."""
    try:
        return rjax.data.load_digits()
    except ImportError as error:
        raise UsageError(f"--data {options.data}: {error}") from error


def _learning_rate(options: PlanOptions, total_steps: int) -> Any:
    rate = fill_in(options).learning_rate
    if rate is None or options.schedule == "constant":
        return rate
    return optax.cosine_decay_schedule(rate, total_steps)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _positive(options: PlanOptions, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError(
                f"{_flag(name)} must be a number above 0, got {value}: "
                "give a positive one"
            )


def _not_negative(options: PlanOptions, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if not (value >= 0 and math.isfinite(value)):
            raise UsageError(
                f"{_flag(name)} must be a number from 0 up, got {value}: "
                "give 0 or a positive one"
            )
