"""Adam and AdamW."""

from rjax.ops.update import AdamRule


def adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0
) -> AdamRule:
    """Adam with coupled (L2) decay: ``q = u + wd w``, then the moments of q.

    ``m <- b1 m + (1-b1) q; v <- b2 v + (1-b2) q^2; w <- w - lr m^ / (sqrt(v^) + eps)``
    with ``m^ = m / (1 - b1^t)``, ``v^ = v / (1 - b2^t)``; t counts applied steps.

    Args:
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: at least 1e-30, so that a zero gradient gives a zero update.
        weight_decay: wd >= 0.

    Returns:
        A rule for ``Config(optimizer=...)``: frozen, hashable, equal by value.

    Raises:
        ValueError: for a number out of range.

    Example:
        >>> adam(weight_decay=0.01).decay
        'coupled'

    Source: Kingma & Ba 2015; decay as in `torch.optim.Adam`.
    """
    return AdamRule(b1, b2, eps, weight_decay, "coupled")


def adamw(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> AdamRule:
    """AdamW: ``w <- w (1 - lr wd)`` first, then Adam on u itself.

    Args:
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: at least 1e-30, so that a zero gradient gives a zero update.
        weight_decay: wd >= 0.

    Returns:
        A rule for ``Config(optimizer=...)``: frozen, hashable, equal by value.

    Raises:
        ValueError: for a number out of range.

    Example:
        >>> adamw().decay
        'decoupled'

    Source: Loshchilov & Hutter 2019, in the form of `torch.optim.AdamW`.
    """
    return AdamRule(b1, b2, eps, weight_decay, "decoupled")
