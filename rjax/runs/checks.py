"""Options with impossible values, or that nothing would read, refused in one line."""

import math
from typing import Any

from rjax.runs.errors import UsageError
from rjax.runs.options import PlanOptions, TrainOptions, flag, flat

_POSITIVE = (
    "image_size", "width", "blocks", "loss_scale", "max_consecutive_skips",
    "clip_norm", "clip_value", "accumulation_steps", "learning_rate", "decay_epochs",
    "decay_rate", "power", "restart_epochs", "epochs", "batch_size", "limit_steps",
    "early_stop", "log_every", "keep_checkpoints",
)  # fmt: skip
_NOT_NEGATIVE = (
    "weight_decay", "ema_decay", "warmup_epochs", "final_learning_rate", "eval_every",
    "seed", "momentum", "dropout", "label_smoothing", "validation_fraction",
    "record_every", "snapshot_every", "crop_pad", "rotate", "erase",
    "checkpoint_every",
)  # fmt: skip
_BELOW_ONE = (
    "ema_decay", "momentum", "dropout", "label_smoothing", "validation_fraction"
)  # fmt: skip

# Which option each depends on, and for which of its values it means something.
READ_BY = {
    "image_size": ("data", ("images",)),
    "hidden": ("model", ("mlp",)),
    "dropout": ("model", ("mlp",)),
    "width": ("model", ("cnn", "resnet")),
    "blocks": ("model", ("resnet",)),
    "momentum": ("optimizer", ("nesterov", "momentum", "lars")),
    "final_learning_rate": ("schedule", ("polynomial", "cosine", "restarts", "wsd")),
    "decay_epochs": ("schedule", ("step", "exponential", "wsd")),
    "decay_rate": ("schedule", ("step", "multistep", "exponential")),
    "milestones": ("schedule", ("multistep",)),
    "power": ("schedule", ("polynomial",)),
    "restart_epochs": ("schedule", ("restarts",)),
    "restart_multiplier": ("schedule", ("restarts",)),
}


def check_options(options: PlanOptions) -> None:
    """Raise a `UsageError` that names the first option with an impossible value."""
    values = flat(options)
    for name in _POSITIVE:
        _check_range(name, values.get(name), "above 0", lambda x: x > 0)
    for name in _NOT_NEGATIVE:
        _check_range(name, values.get(name), "from 0 up", lambda x: x >= 0)
    for name in _BELOW_ONE:
        _check_range(name, values.get(name), "below 1", lambda x: x < 1)
    for name in ("hidden", "milestones"):
        if values.get(name) == ():
            raise UsageError(f"{flag(name)} needs a number, or several: give them")
        for value in values.get(name) or ():
            _check_range(name, value, "above 0", lambda x: x > 0)
    _check_read(values)
    _check_update(values)
    if values.get("seed", 0) >= 2**32:
        raise UsageError(f"--seed must be below 2**32, got {values['seed']}")
    if isinstance(options, TrainOptions):
        _check_training(values)


def _check_range(name: str, value: Any, words: str, holds: Any) -> None:
    if value is not None and not (math.isfinite(value) and holds(value)):
        raise UsageError(f"{flag(name)} must be a number {words}, got {value}")


def _check_read(values: dict[str, Any]) -> None:
    """Refuse an option that was given and that this run would never look at."""
    for name, (decider, served) in READ_BY.items():
        if values.get(name) is not None and values[decider] not in served:
            raise UsageError(
                f"{flag(name)} means nothing with {flag(decider)} {values[decider]}: "
                f"leave it out, or take {flag(decider)} {' or '.join(served)}"
            )


def _check_update(values: dict[str, Any]) -> None:
    if values["clip_norm"] is not None and values["clip_value"] is not None:
        raise UsageError("--clip-norm and --clip-value exclude each other: give one")
    if values["clip_on_inf"] == "clamp" and values["clip_value"] is None:
        raise UsageError("--clip-on-inf needs --clip-value: give the bound as well")
    if values["ema_batch_stats"] == "copy" and not values["ema_decay"]:
        raise UsageError("--ema-batch-stats needs an average: give --ema-decay above 0")
    if values["scaling"] == "off" and values["loss_scale"] is not None:
        raise UsageError("--loss-scale means nothing with --scaling off: give one")


def _check_augmentation(values: dict[str, Any]) -> None:
    _check_range("erase", values["erase"], "of at most 1", lambda x: x <= 1)
    if values["erase_area"] is not None and not values["erase"]:
        raise UsageError("--erase-area means nothing without --erase: give both")
    least, most = values["erase_area"] or (1.0, 1.0)
    if not 0 < least <= most <= 1:
        raise UsageError(
            "--erase-area must be two numbers above 0 and of at most 1, the lower "
            f"first, got {least:g} {most:g}"
        )
    low, high = values["zoom"] or (1.0, 1.0)
    if not (0 < low <= high and math.isfinite(high)):
        raise UsageError(
            f"--zoom must be two numbers above 0, the lower first, got {low:g} {high:g}"
        )


def _check_training(values: dict[str, Any]) -> None:
    _check_augmentation(values)
    if values["batch_size"] % values["accumulation_steps"]:
        raise UsageError(
            f"--batch-size {values['batch_size']} does not split into "
            f"--accumulation-steps {values['accumulation_steps']} equal parts: "
            "make it a multiple"
        )
    if values["snapshot_every"] and not values["record_every"]:
        raise UsageError(
            "--snapshot-every needs a record: give --record-every a number above 0"
        )
    if values["record_grads"] and not values["record_every"]:
        raise UsageError(
            "--record-grads needs a record: give --record-every a number above 0"
        )
    if values["early_stop"] is not None and not values["eval_every"]:
        raise UsageError(
            "--early-stop needs evaluations: give --eval-every a number above 0"
        )
    if values["early_stop"] is not None and values["validation_fraction"] == 0:
        raise UsageError(
            "--early-stop must not watch the test set: give --validation-fraction a "
            "share such as 0.1"
        )
