"""What the options stand for: data, a model, a configuration."""

from collections.abc import Callable
from typing import Any

import rjax
from rjax.data import Dataset, augment
from rjax.runs.errors import UsageError
from rjax.runs.options import (
    AugmentOptions,
    LoopOptions,
    NetworkOptions,
    NumericsOptions,
    PlanOptions,
    SourceOptions,
    UpdateOptions,
)

# A rate that suits each optimizer on the small sets served here.
LEARNING_RATES = {
    "sgd": 0.1,
    "momentum": 0.1,
    "nesterov": 0.1,
    "adam": 1e-3,
    "adamw": 1e-3,
    "lars": 1.0,
}

_LOADERS: dict[str, Callable[[str], Dataset]] = {
    "mnist": rjax.data.load_mnist,
    "fashion-mnist": rjax.data.load_fashion_mnist,
    "cifar10": rjax.data.load_cifar10,
    "cifar100": rjax.data.load_cifar100,
}

# Image shape and number of classes, for a plan without the files.
_PUBLISHED = {
    "digits": ((8, 8, 1), 10),
    "mnist": ((28, 28, 1), 10),
    "fashion-mnist": ((28, 28, 1), 10),
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
}


def load_data(options: SourceOptions) -> Dataset:
    """Return the data set that `--data` names.

    Raises:
        UsageError: with what is wrong about the files, or the package that is missing.
    """
    name, folder = options.data, options.data_dir
    try:
        if name == "digits":
            if folder is not None:
                raise UsageError(
                    "--data digits reads no files: leave --data-dir out, or name "
                    "another set with --data"
                )
            return rjax.data.load_digits()
        if folder is None:
            raise UsageError(
                f"--data {name} needs --data-dir: give the folder that holds its files"
            )
        if name == "images":
            return rjax.data.load_image_folder(folder, image_size=options.image_size)
        return _LOADERS[name](folder)
    except (ImportError, ValueError) as error:
        raise UsageError(f"--data {name}: {' '.join(str(error).split())}") from error


def shape_and_classes(options: SourceOptions) -> tuple[tuple[int, ...], int]:
    """Return image shape and number of classes, from the files only if need be."""
    if options.data_dir is None and options.data in _PUBLISHED:
        return _PUBLISHED[options.data]
    data = load_data(options)
    return image_shape(data), data.num_classes


def image_shape(data: Dataset) -> tuple[int, ...]:
    """Return the shape of one image."""
    first = rjax.data.batch_at(data.train, 1, seed=0, step=0)
    return first[0].shape[1:]


def hold_out(data: Dataset, options: LoopOptions) -> tuple[Any, Any]:
    """Return what is trained on, and what is evaluated meanwhile (or `None`)."""
    fraction = options.validation_fraction
    if fraction is None:
        fraction = 0.1 if options.early_stop is not None else 0.0
    if not fraction:
        return data.train, None
    try:
        return rjax.data.split(data.train, fraction, options.seed)
    except ValueError as error:
        raise UsageError(f"--validation-fraction {fraction:g}: {error}") from error


def build_model(options: NetworkOptions, num_classes: int) -> Any:
    """Return the Linen module that `--model` names."""
    if options.model == "mlp":
        return rjax.nn.MLP(
            features=options.hidden or (256, 128),
            num_classes=num_classes,
            dropout=options.dropout or 0.0,
        )
    if options.model == "cnn":
        return rjax.nn.CNN(num_classes=num_classes, width=options.width or 32)
    return rjax.nn.ResNet(
        num_classes=num_classes, blocks=options.blocks or 3, width=options.width or 16
    )


def build_augmentation(
    options: AugmentOptions, black: tuple[float, ...] = (0.0,)
) -> augment.Chain | None:
    """Return what changes training images at random, `None` for nothing.

    Args:
        options: of the changes.
        black: what they fill with, one number for all channels or one for each.
    """
    ground = black[0] if len(black) == 1 else black
    steps = []
    if options.crop_pad:
        steps.append(augment.RandomCrop(pad=options.crop_pad, fill=ground))
    if options.flip:
        steps.append(augment.RandomHorizontalFlip())
    if options.rotate or options.zoom:
        degrees, zoom = options.rotate or 0.0, options.zoom or (1.0, 1.0)
        steps.append(augment.RandomAffine(degrees=degrees, scale=zoom, fill=ground))
    if options.erase:
        area = options.erase_area or augment.RandomErasing.area
        steps.append(augment.RandomErasing(options.erase, area, value=ground))
    return augment.Chain(*steps) if steps else None


def build_config(options: PlanOptions, learning_rate: Any) -> rjax.Config:
    """Return the pipeline's configuration at a rate or schedule."""
    update = options.update
    return rjax.Config(
        precision=options.numerics.precision,
        scaling=_scaling(options.numerics),
        optimizer=_optimizer(update),
        learning_rate=learning_rate,
        clip=_clip(update),
        ema=_ema(update),
        accumulation_steps=update.accumulation_steps,
    )


def base_rate(options: UpdateOptions, learning_rate: float | None) -> float:
    """Return the rate that was asked for, or one that suits the optimizer."""
    return learning_rate or LEARNING_RATES[options.optimizer]


def _scaling(options: NumericsOptions) -> Any:
    first = options.loss_scale
    rule = options.scaling
    if rule == "auto":
        if first is None:
            return None
        rule = "halving"
    if rule == "off":
        return rjax.scaling.off()
    if rule == "static":
        return rjax.scaling.static(8192.0 if first is None else first)
    given = {} if first is None else {"init": first}
    return getattr(rjax.scaling, rule)(**given)


def _optimizer(options: UpdateOptions) -> Any:
    given = {} if options.momentum is None else {"momentum": options.momentum}
    make = getattr(rjax.optim, options.optimizer)
    return make(weight_decay=options.weight_decay, **given)


def _clip(options: UpdateOptions) -> rjax.Clip | None:
    if options.clip_norm is not None:
        return rjax.Clip(norm=options.clip_norm)
    if options.clip_value is not None:
        return rjax.Clip(value=options.clip_value, on_inf=options.clip_on_inf)
    return None


def _ema(options: UpdateOptions) -> rjax.Ema | None:
    if not options.ema_decay:
        return None
    return rjax.Ema(decay=options.ema_decay, batch_stats=options.ema_batch_stats)
