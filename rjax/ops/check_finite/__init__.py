"""One flag over a whole arena, and its norm, in one pass."""

from rjax.ops.check_finite.api import Check, check_finite, nonfinite_slots

__all__ = ["Check", "check_finite", "nonfinite_slots"]
