"""Optimizers: the native ones as range operations, any other through Optax.

Formulas (float32 throughout): ``u`` true gradient after the clip, ``lr``
learning rate, ``wd`` weight decay. The bias-like range never decays by default.
"""

from rjax.ops.update import AdamRule, LarsRule, SgdRule
from rjax.optim.adam import adam, adamw
from rjax.optim.lars import lars
from rjax.optim.optax import OptaxOptimizer, from_optax
from rjax.optim.sgd import momentum, nesterov, sgd

Optimizer = SgdRule | AdamRule | LarsRule | OptaxOptimizer

__all__ = [
    "OptaxOptimizer",
    "Optimizer",
    "adam",
    "adamw",
    "from_optax",
    "lars",
    "momentum",
    "nesterov",
    "sgd",
]
