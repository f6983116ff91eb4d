"""Recipes: options that belong together, under one name."""

from collections.abc import Mapping, Sequence

from rjax.runs.checks import READ_BY
from rjax.runs.options import (
    AugmentOptions,
    LoopOptions,
    NetworkOptions,
    RateOptions,
    RecipeOptions,
    SourceOptions,
    TrainOptions,
    UpdateOptions,
    flag,
    flat,
    with_values,
)

RECIPES: Mapping[str, TrainOptions] = {
    "mnist-mlp": TrainOptions(
        recipe=RecipeOptions(recipe="mnist-mlp"),
        source=SourceOptions(data="mnist", normalize="mnist"),
        network=NetworkOptions(model="mlp", hidden=(1024, 512, 256)),
        update=UpdateOptions(optimizer="adamw", weight_decay=1e-4, ema_decay=0.0),
        augment=AugmentOptions(
            crop_pad=2,
            rotate=20.0,
            zoom=(0.8, 1.2),
            erase=0.5,
            erase_area=(0.005, 0.02),
        ),
        rate=RateOptions(
            learning_rate=1e-3,
            schedule="cosine",
            warmup_epochs=5.0,
            final_learning_rate=1e-6,
        ),
        loop=LoopOptions(
            epochs=100, batch_size=200, label_smoothing=0.1, whole_epochs=True
        ),
    )
}

# Where the data and the results lie, and which run of several it is: no matter of a
# recipe.
_OWN = frozenset(
    "data_dir seed deterministic compile_cache out log_every plan tensorboard "
    "record_every snapshot_every record_grads checkpoint_every keep_checkpoints "
    "weights resume".split()
)


def named(words: Sequence[str], option: str) -> str:
    """Return what the words of a command line give an option, "" for nothing."""
    value = ""
    for i, word in enumerate(words):
        given, equals, inline = word.partition("=")
        if given == option:
            value = inline if equals else "".join(words[i + 1 : i + 2])
    return value


def defaults(words: Sequence[str]) -> TrainOptions:
    """Return the defaults of `rjax train`: those of the recipe that is named, if any.

    Args:
        words: of the command line; what names no recipe is left to its parser.
    """
    return RECIPES.get(named(words, "--recipe"), TrainOptions())


def without_idle(options: TrainOptions) -> TrainOptions:
    """Return options without those of the recipe that others have made meaningless.

    What the recipe and the command line say alike counts as the recipe's.
    """
    if options.recipe.recipe is None:
        return options
    values, ours = flat(options), flat(RECIPES[options.recipe.recipe])
    idle = [
        name
        for name, (decider, served) in READ_BY.items()
        if values[decider] not in served and values[name] == ours[name]
    ]
    return with_values(options, **dict.fromkeys(idle))


def describe(options: TrainOptions) -> str:
    """Return a line that says in what a run differs from its recipe.

    Example:
        >>> print(describe(with_values(RECIPES["mnist-mlp"], epochs=3, seed=1)))
        recipe mnist-mlp with --epochs 3 instead of 100
    """
    name = options.recipe.recipe
    assert name is not None
    ours = flat(RECIPES[name])
    changed = [
        change(option, value, ours[option])
        for option, value in flat(options).items()
        if value != ours[option] and option not in _OWN
    ]
    return f"recipe {name}" + (f" with {', '.join(changed)}" if changed else "")


def change(option: str, value: object, former: object) -> str:
    """Return an option with another value as it is typed, and the former one.

    Example:
        >>> change("epochs", 3, 100)
        '--epochs 3 instead of 100'
    """
    if isinstance(value, bool):
        return flag(option) if value else flag(f"no_{option}")
    words, before = map(_typed, (value, former))
    return f"{flag(option)} {words} instead of {before}"


def _typed(value: object) -> str:
    """Return a value as it is typed, several with spaces between."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)
