"""Unscale, clip and apply an optimizer to a whole arena."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rjax.ops.dispatch import resolve
from rjax.ops.slots import ROW, SlotTable
from rjax.ops.update import base
from rjax.ops.update.rules import Rule

_HUGE = 2.0**64


class Moments(NamedTuple):
    """The arenas an update returns.

    Attributes:
        master: float32[n], updated masters.
        mu: float32[n], first moment or momentum; `None` if the rule keeps none.
        nu: float32[n], second moment; `None` if the rule keeps none.
    """

    master: Float[Array, " n"]
    mu: Float[Array, " n"] | None
    nu: Float[Array, " n"] | None


def update(
    rule: Rule,
    master: Float[Array, " n"],
    u: Float[Array, " n"],
    mu: Float[Array, " n"] | None,
    nu: Float[Array, " n"] | None,
    *,
    learning_rate: Float[Array, ""],
    count: Int[Array, ""],
    table: SlotTable,
    implementation: str | None = None,
) -> Moments:
    """Apply one optimizer step to every parameter at once.

    Equals, per element, the formulas of :mod:`rjax.optim`, in float32. Padding is zero
    and stays zero.

    Args:
        rule: the optimizer's numbers.
        master: float32[n] weights.
        u: float32[n] true gradients, from :func:`unscale`.
        mu: float32[n] or `None`, as the rule requires.
        nu: float32[n] or `None`, as the rule requires.
        learning_rate: float32[].
        count: int32[], the number of this update: 1 for the first.
        table: the slots that tile the arena, with their decay and LARS marks.
        implementation: "xla" or `None`.

    Returns:
        The next :class:`Moments`.

    Raises:
        ValueError: for arenas whose length is not that of the table.
        NotImplementedError: if the implementation named cannot serve.

    Example:
        >>> from rjax.ops.update.rules import SgdRule
        >>> table = SlotTable(rows=(1,), decay=(False,), adaptive=(False,))
        >>> w = jnp.ones(128)
        >>> new = update(SgdRule(), w, w, None, None, table=table,
        ...              learning_rate=jnp.float32(0.25), count=jnp.int32(1))
        >>> float(new.master[0])
        0.75

    Source: `optimizer_op.cu` of the article, section 4.2.
    """
    n = table.num_rows * ROW
    for name, arena in (("master", master), ("u", u), ("mu", mu), ("nu", nu)):
        if arena is not None and (arena.shape != (n,) or arena.dtype != jnp.float32):
            raise ValueError(
                f"`{name}` must be float32[{n}] as the slot table says, got "
                f"{arena.dtype}{list(arena.shape)}."
            )
    run = resolve("update", implementation, {"xla": base.update})
    return Moments(*run(rule, master, u, mu, nu, learning_rate, count, table))


def unscale(
    grads: Float[Array, " n"],
    scale: Float[Array, ""],
    *,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    norm: Float[Array, ""] | None = None,
) -> Float[Array, " n"]:
    """Return the true gradient ``u = grads / scale``, clipped if asked.

    Bounds are in true-gradient units, so the result does not depend on `scale`.

    Args:
        grads: float32[n] gradients, multiplied by `scale`.
        scale: float32[], loss scale of this step.
        clip_value: clamp u to [-clip_value, clip_value].
        clip_norm: multiply u by ``min(1, clip_norm / norm)``.
        norm: float32[], norm of u before the clip; needed with `clip_norm`.

    Example:
        >>> unscale(jnp.array([8.0, -32.0]), jnp.float32(8.0), clip_value=2.0).tolist()
        [1.0, -2.0]

    Source: the article, sections 4.2 and 4.3.
    """
    u = grads / scale
    if clip_value is not None:
        u = jnp.clip(u, -clip_value, clip_value)
    if clip_norm is not None:
        assert norm is not None
        # A ratio below 2^-126 would be flushed to zero: shrink huge gradients first.
        huge = (norm > _HUGE) & (norm > clip_norm)
        u = jnp.where(huge, u * (1.0 / _HUGE), u)
        norm = jnp.where(huge, norm * (1.0 / _HUGE), norm)
        u = u * jnp.minimum(jnp.float32(1.0), clip_norm / norm)
    return u
