"""The optimizer step over a whole arena."""

from rjax.ops.update.api import (
    Moments,
    fused_implementation,
    fused_update,
    unscale,
    update,
)
from rjax.ops.update.arenas import Arenas
from rjax.ops.update.rules import AdamRule, LarsRule, Rule, SgdRule

__all__ = [
    "AdamRule",
    "Arenas",
    "LarsRule",
    "Moments",
    "Rule",
    "SgdRule",
    "fused_implementation",
    "fused_update",
    "unscale",
    "update",
]
