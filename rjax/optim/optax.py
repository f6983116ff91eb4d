"""Any Optax transformation as an optimizer, under the same gate."""

import dataclasses
from typing import Any, ClassVar

import optax


@dataclasses.dataclass(frozen=True)
class OptaxOptimizer:
    """See :func:`from_optax`; equality is that of the transformation's functions."""

    tx: optax.GradientTransformation

    has_mu: ClassVar[bool] = False
    has_nu: ClassVar[bool] = False
    has_ratios: ClassVar[bool] = False


def from_optax(tx: Any) -> OptaxOptimizer:
    """Use an Optax transformation on unscaled float32 views of the arenas.

    Its state is part of the training state and moves only on applied steps. It
    carries its own learning rate, so `Config(learning_rate=None)` goes with it.

    Args:
        tx: an `optax.GradientTransformation`.

    Raises:
        ValueError: if `tx` has no `init` and `update`.

    Example:
        >>> import optax
        >>> from_optax(optax.sgd(0.1)).has_mu
        False
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(
            "from_optax takes an optax.GradientTransformation, got "
            f"{type(tx).__name__}."
        )
    return OptaxOptimizer(tx)
