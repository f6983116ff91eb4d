"""The optimizer step over a whole arena."""

from rjax.ops.update.api import Moments, unscale, update
from rjax.ops.update.rules import AdamRule, LarsRule, Rule, SgdRule

__all__ = ["AdamRule", "LarsRule", "Moments", "Rule", "SgdRule", "unscale", "update"]
