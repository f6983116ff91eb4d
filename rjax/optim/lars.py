"""Layer-wise adaptive rate scaling."""

from rjax.ops.update import LarsRule


def lars(
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust_coefficient: float = 1e-3,
    eps: float = 1e-8,
    nesterov: bool = False,
) -> LarsRule:
    """LARS: a trust ratio per tensor, ``eta = tc |w| / (|u| + wd |w| + eps)``.

    ``q = u + wd w; m <- b m + lr eta q; w <- w - m``; with Nesterov
    ``w <- w - (lr eta q + b m)``. eta is 1 if either norm is below 1e-12, and at
    most 100. Bias-like parameters use momentum (or Nesterov) without ratio or decay.

    Args:
        momentum: b in [0, 1).
        weight_decay: wd >= 0.
        trust_coefficient: tc > 0.
        eps: >= 0.
        nesterov: look one step ahead.

    Returns:
        A rule for ``Config(optimizer=...)``: frozen, hashable, equal by value.

    Raises:
        ValueError: for a number out of range.

    Example:
        >>> lars().has_ratios
        True

    Source: You, Gitman & Ginsburg 2017.
    """
    return LarsRule(momentum, weight_decay, trust_coefficient, eps, nesterov)
