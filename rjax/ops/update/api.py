"""Unscale, clip and apply an optimizer to a whole arena."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rjax.ops import mosaic
from rjax.ops.dispatch import choose, resolve
from rjax.ops.ranges import check_length
from rjax.ops.slots import ROW, SlotTable
from rjax.ops.update import base, formulas, mosaic_gpu
from rjax.ops.update.arenas import Arenas
from rjax.ops.update.rules import Rule


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
        implementation: "xla", "mosaic_gpu" or `None` to choose. The kernel moves
            the arenas in place: donate them, or let the caller's jit drop them.

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
    arenas = Arenas(master, mu=mu, nu=nu)
    _check_arenas(rule, arenas, u, "u", table)
    options = base.Options()
    available: dict[str, Any] = {
        "xla": functools.partial(base.update, rule, table=table),
        "mosaic_gpu": _why_no_kernel(*arenas, u)
        or functools.partial(_update_kernel, rule, table=table),
    }
    size = mosaic_gpu.op_name(rule, options), u.size
    run = resolve("update", implementation, available, size)
    return Moments(*run(master, u, mu, nu, learning_rate, count))


def fused_update(
    rule: Rule,
    arenas: Arenas,
    grads: Float[Array, " n"],
    *,
    scale: Float[Array, ""],
    learning_rate: Float[Array, ""],
    count: Int[Array, ""],
    table: SlotTable,
    skip: Bool[Array, ""] | None = None,
    clip_value: float | None = None,
    clip_norm: float | None = None,
    norm: Float[Array, ""] | None = None,
    ema_decay: float | None = None,
    implementation: str | None = None,
) -> Arenas:
    """Move everything an optimizer step moves, or nothing, in one pass over arenas.

    Equals :func:`unscale`, :func:`update`, :func:`rjax.ops.ema` and the casts of
    masters and average one after the other, if `skip` is clear. If it is set, the
    arenas keep their bits, whatever the gradients hold.

    Args:
        rule: the optimizer's numbers.
        arenas: all that the step moves. The kernel moves them in place: donate them,
            or let the caller's jit drop them.
        grads: float32[n] gradients, multiplied by `scale`.
        scale: float32[], loss scale of this step.
        learning_rate: float32[].
        count: int32[], the number of this update: 1 for the first.
        table: the slots that tile the arena, with their decay and LARS marks.
        skip: bool[], set if nothing may move; `None` if the step surely counts.
        clip_value: clamp u to [-clip_value, clip_value].
        clip_norm: multiply u by ``min(1, clip_norm / norm)``.
        norm: float32[], norm of u before the clip; needed with `clip_norm`.
        ema_decay: decay of `arenas.ema`; needed if there is one.
        implementation: "xla", "mosaic_gpu" or `None` to choose. The kernel gives the
            bits that XLA gives on GPU: neither contracts a product with a sum. On CPU,
            where XLA does, and for LARS, whose norms are sums in another order, the
            two agree within the roundings of float32.

    Returns:
        The next :class:`Arenas`, with `None` where there was `None`.

    Raises:
        ValueError: for arenas that do not fit the table, the rule or each other.
        NotImplementedError: if the implementation named cannot serve.

    Example:
        >>> from rjax.ops.update.rules import SgdRule
        >>> table = SlotTable(rows=(1,), decay=(False,), adaptive=(False,))
        >>> old = Arenas(jnp.ones(128), compute=jnp.ones(128, jnp.float16))
        >>> new = fused_update(SgdRule(), old, 4 * jnp.ones(128), table=table,
        ...                    scale=jnp.float32(4), learning_rate=jnp.float32(0.25),
        ...                    count=jnp.int32(1))
        >>> float(new.master[0]), float(new.compute[0])
        (0.75, 0.75)

    Source: stages 9 to 11 of the article's step, sections 4.2 to 4.4.
    """
    if (clip_norm is None) != (norm is None):
        raise ValueError("`norm` and `clip_norm` go together; pass both or neither.")
    if (ema_decay is None) != (arenas.ema is None):
        raise ValueError("`ema_decay` and `arenas.ema` go together; pass both or none.")
    _check_arenas(rule, arenas, grads, "grads", table)
    options = base.Options(clip_value, clip_norm, ema_decay)
    scalars = base.Scalars(scale, learning_rate, count, norm)
    available = _implementations(rule, arenas, table, options)
    size = mosaic_gpu.op_name(rule, options), grads.size
    run = resolve("fused_update", implementation, available, size)
    return run(arenas, grads, skip, scalars)


def _implementations(
    rule: Rule, arenas: Arenas, table: SlotTable, options: base.Options
) -> dict[str, Any]:
    bound = {"rule": rule, "table": table, "options": options}
    return {
        "xla": functools.partial(base.fused_update, **bound),
        "mosaic_gpu": _why_no_kernel(*arenas)
        or functools.partial(mosaic_gpu.fused_update, **bound),
    }


def fused_implementation(
    rule: Rule,
    arenas: Arenas,
    *,
    table: SlotTable,
    ema_decay: float | None = None,
    implementation: str | None = None,
) -> str:
    """Return "xla" or "mosaic_gpu": what :func:`fused_update` will run.

    For callers whose own program depends on it: the kernel predicates by itself, the
    rest is best put under one conditional.

    Args:
        rule: as for :func:`fused_update`, like all arguments.
        arenas: what moves.
        table: the slots that tile the arena.
        ema_decay: decay of the average, if there is one.
        implementation: "xla", "mosaic_gpu" or `None` to choose.

    Raises:
        NotImplementedError: if the implementation named cannot serve.
    """
    options = base.Options(ema_decay=ema_decay)
    available = _implementations(rule, arenas, table, options)
    size = mosaic_gpu.op_name(rule, options), arenas.master.size
    return choose("fused_update", implementation, available, size)


def _check_arenas(
    rule: Rule, arenas: Arenas, grads: jax.Array, name: str, table: SlotTable
) -> None:
    """Raise unless arenas and gradients have the table's length and types."""
    check_length("master", arenas.master)
    n = table.num_rows * ROW
    wide = {name: grads, **arenas._asdict()}
    halves = [wide.pop("compute"), wide.pop("ema_compute")]
    for key, arena in wide.items():
        if arena is not None and (arena.shape != (n,) or arena.dtype != jnp.float32):
            raise ValueError(
                f"`{key}` must be float32[{n}] as the slot table says, got "
                f"{arena.dtype}{list(arena.shape)}."
            )
    for key, needed in (("mu", rule.has_mu), ("nu", rule.has_nu)):
        if needed != (getattr(arenas, key) is not None):
            wanted = "an arena" if needed else "None"
            raise ValueError(f"`{key}` must be {wanted} for {type(rule).__name__}.")
    sizes = {(str(half.dtype), half.shape) for half in halves if half is not None}
    starts = {0, *(int(row) * ROW for row in table.row_starts)}
    fits = all(len(s) == 1 and n - s[0] in starts for _, s in sizes)
    if len(sizes) > 1 or not fits or (halves[1] is not None and arenas.ema is None):
        raise ValueError(
            "`compute` and `ema_compute` must be half-precision copies of the same "
            f"last slots, got {sorted(sizes)} for {n} elements."
        )


def _why_no_kernel(*arrays: jax.Array | None) -> str | None:
    return mosaic.why_not() or mosaic.varying_reference(*arrays)


def _update_kernel(
    rule: Rule,
    master: jax.Array,
    u: jax.Array,
    mu: jax.Array | None,
    nu: jax.Array | None,
    lr: jax.Array,
    count: jax.Array,
    table: SlotTable,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    scalars = base.Scalars(jnp.ones((), jnp.float32), lr, count, None)
    old = Arenas(master, mu=mu, nu=nu)
    options = base.Options()
    new = mosaic_gpu.fused_update(old, u, None, scalars, rule, table, options)
    return new.master, new.mu, new.nu


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

    Returns:
        float32[n], u.

    Example:
        >>> unscale(jnp.array([8.0, -32.0]), jnp.float32(8.0), clip_value=2.0).tolist()
        [1.0, -2.0]

    Source: the article, sections 4.2 and 4.3.
    """
    factors = None
    if clip_norm is not None:
        assert norm is not None
        factors = formulas.norm_clip(clip_norm, norm)
    return formulas.true_gradient(grads, scale, clip_value, factors)
