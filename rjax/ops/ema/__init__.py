"""Exponential moving average of an arena."""

from rjax.ops.ema.api import ema

__all__ = ["ema"]
