"""Stochastic gradient descent, plain, with momentum, with Nesterov momentum."""

from typing import Literal

from rjax.ops.update import SgdRule

Decay = Literal["decoupled", "coupled"]


def sgd(weight_decay: float = 0.0, decay: Decay = "decoupled") -> SgdRule:
    """Plain SGD: ``w <- w (1 - lr wd) - lr u``.

    Args:
        weight_decay: wd >= 0.
        decay: "decoupled" (the article) or "coupled" (PyTorch and Optax:
            ``u <- u + wd w`` first, and no factor).

    Returns:
        A rule for ``Config(optimizer=...)``: frozen, hashable, equal by value.

    Raises:
        ValueError: for a number out of range or an unknown `decay`.

    Example:
        >>> sgd(weight_decay=1e-4).has_mu
        False

    Source: the article, section 4.2.
    """
    return SgdRule(None, False, weight_decay, decay)


def momentum(
    momentum: float = 0.9, weight_decay: float = 0.0, decay: Decay = "decoupled"
) -> SgdRule:
    """Heavy-ball momentum: ``m <- b m + u; w <- w (1 - lr wd) - lr m``.

    Args:
        momentum: b in [0, 1).
        weight_decay: wd >= 0.
        decay: as for :func:`sgd`.

    Returns:
        A rule for ``Config(optimizer=...)``: frozen, hashable, equal by value.

    Raises:
        ValueError: for a number out of range or an unknown `decay`.

    Example:
        >>> momentum(0.9).has_mu
        True

    Source: Polyak 1964, in the form of Sutskever et al. 2013 used by PyTorch.
    """
    return SgdRule(momentum, False, weight_decay, decay)


def nesterov(
    momentum: float = 0.9, weight_decay: float = 0.0, decay: Decay = "decoupled"
) -> SgdRule:
    """Nesterov momentum: ``m <- b m + u; w <- w (1 - lr wd) - lr (b m + u)``.

    Args:
        momentum: b in [0, 1).
        weight_decay: wd >= 0.
        decay: as for :func:`sgd`.

    Returns:
        A rule for ``Config(optimizer=...)``: frozen, hashable, equal by value.

    Raises:
        ValueError: for a number out of range or an unknown `decay`.

    Example:
        >>> nesterov(0.9).nesterov
        True

    Source: Sutskever et al. 2013, in the form used by PyTorch.
    """
    return SgdRule(momentum, True, weight_decay, decay)
