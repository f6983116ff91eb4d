"""Forward and backward pass on the compute view, micro-batch by micro-batch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from rjax.ops import cast
from rjax.ops.dense import float32_weight_gradients
from rjax.ops.manual_axes import align
from rjax.plan import Plan
from rjax.state import RegionState, assemble, views
from rjax.trees import dtype_of, flatten

_SIGNATURE = (
    "`loss_fn(params, batch_stats, batch, key)` must return "
    "(loss, (new_batch_stats, metrics)); wrap a function (params, batch) -> loss with "
    "rjax.stateless_loss."
)


class Gradients(NamedTuple):
    """What the forward and backward pass yield.

    Attributes:
        cotangents: one array per slot, times the scale: half or float32.
        loss: f32[], mean over the batch, unscaled.
        metrics: pytree from the loss function.
        next_stats: running statistics after the batch.
    """

    cotangents: tuple[jax.Array, ...]
    loss: jax.Array
    metrics: Any
    next_stats: Any


def loss_gradients(
    plan: Plan, state: RegionState, batch: Any, loss_fn: Any, scale: jax.Array
) -> Gradients:
    """Differentiate ``scale * loss`` with respect to every slot's view.

    The scale multiplies the float32 loss, before the first half-precision value of
    the backward pass. With k micro-batches the gradients are summed in float32 and
    divided by k once; running statistics flow through them in order.

    Args:
        plan: the static layout.
        state: the training state.
        batch: pytree of arrays.
        loss_fn: ``(params, batch_stats, batch, key) -> (loss, (stats, metrics))``.
        scale: f32[], loss scale of this step.
    """
    key = jax.random.fold_in(state.key, state.step)
    view = views(plan, state.master, state.compute)
    micro = functools.partial(_micro_batch, plan, state.frozen, loss_fn, scale, view)
    k = plan.config.accumulation_steps
    if k == 1:
        return micro(state.batch_stats, batch, jax.random.fold_in(key, 0))

    def body(carry: Any, inputs: Any) -> Any:
        sums, stats = carry
        i, part = inputs
        found = micro(stats, part, jax.random.fold_in(key, i))
        wide = (cast(ct, jnp.float32) for ct in found.cotangents)
        sums = tuple(a + b for a, b in zip(sums, wide, strict=True))
        return (sums, found.next_stats), (found.loss, found.metrics)

    zeros = tuple(jnp.zeros(slot.shape, jnp.float32) for slot in plan.slots)
    (sums, stats), (losses, metrics) = lax.scan(
        body, (zeros, state.batch_stats), (jnp.arange(k), split(batch, k))
    )
    means = tuple(total / k for total in sums)
    return Gradients(means, jnp.mean(losses), jax.tree.map(_over_micro, metrics), stats)


def _over_micro(stacked: jax.Array) -> jax.Array:
    """Average floats and bools over micro-batches, sum integers, take the last key."""
    if jnp.issubdtype(stacked.dtype, jax.dtypes.prng_key):
        return stacked[-1]
    if jnp.issubdtype(stacked.dtype, jnp.integer):
        return jnp.sum(stacked, axis=0, dtype=stacked.dtype)
    return jnp.mean(stacked.astype(jnp.float32), axis=0)


def split(batch: Any, k: int) -> Any:
    """Split the leading axis of every leaf into k micro-batches.

    Raises:
        ValueError: if a leaf has no leading axis that k divides.
    """
    for path, leaf in flatten(batch)[0]:
        shape = np.shape(leaf)
        if not shape or shape[0] % k:
            size = shape[0] if shape else "no leading axis"
            raise ValueError(
                f"`batch` leaf {path or 'array'!r} must have a leading size divisible "
                f"by accumulation_steps={k}, got {size}; change the batch size."
            )
    return jax.tree.map(lambda x: x.reshape(k, x.shape[0] // k, *x.shape[1:]), batch)


def _tappable(value: jax.Array) -> bool:
    """Whether `ops.dense` could be given this very array as its kernel."""
    return value.ndim == 2 and value.dtype in (jnp.float16, jnp.bfloat16)


def _watched(x: jax.Array, note: Any) -> jax.Array:
    """Return x; `note` is called while tracing if a gradient arrives at it."""

    @jax.custom_vjp
    def same(x: jax.Array) -> jax.Array:
        return x

    def backward(_: None, ct: Any) -> tuple[Any]:
        if isinstance(ct, SymbolicZero):
            return (None,)
        note()
        return (ct,)

    same.defvjp(lambda x: (x.value, None), backward, symbolic_zeros=True)
    return same(x)


def differentiate(
    scaled_loss: Callable[[list[jax.Array]], Any], view: list[jax.Array]
) -> tuple[tuple[jax.Array, ...], Any]:
    """Differentiate ``scaled_loss(view) -> (f32[], aux)`` by the leaves of a view.

    Args:
        scaled_loss: of the very arrays it is given, so that `ops.dense` knows them.
        view: floating arrays.

    Returns:
        A cotangent for each of the view, of its dtype, but float32 for a half kernel
        that went through `ops.dense`; and `aux`.
    """
    where = [i for i, x in enumerate(view) if _tappable(x)]
    taps = [
        align(view[i], jnp.zeros(view[i].shape, jnp.float32))[1] for i in where
    ]  # fmt: skip
    used: set[int] = set()
    elsewhere: set[int] = set()

    def tapped(view: list[jax.Array], taps: list[jax.Array]) -> Any:
        view = list(view)
        for i in where:
            view[i] = _watched(view[i], functools.partial(elsewhere.add, i))
        kernels = [view[i] for i in where]
        with float32_weight_gradients(kernels, taps) as record:
            returned = scaled_loss(view)
        used.update(record.used)
        return returned

    scaled, pullback, aux = jax.vjp(tapped, view, taps, has_aux=True)
    cotangents, wide = pullback(align(scaled, jnp.ones((), jnp.float32))[1])
    for position in used:
        i = where[position]
        # A kernel that `dense` alone uses has no other gradient: none is added to it.
        rest = [cast(cotangents[i], jnp.float32)] if i in elsewhere else []
        cotangents[i] = sum(rest, start=wide[position])
    return tuple(cotangents), aux


def _micro_batch(
    plan: Plan,
    frozen: dict[str, jax.Array],
    loss_fn: Any,
    scale: jax.Array,
    view: list[jax.Array],
    batch_stats: Any,
    batch: Any,
    key: jax.Array,
) -> Gradients:
    """Differentiate one micro-batch."""

    def scaled_loss(view: list[jax.Array]) -> Any:
        params = assemble(plan, view, frozen)
        loss, stats, metrics = _checked(
            loss_fn(params, batch_stats, batch, key), batch_stats
        )
        return loss.astype(jnp.float32) * scale, (loss, stats, metrics)

    cotangents, (loss, stats, metrics) = differentiate(scaled_loss, view)
    # A half-precision loss is reported as rounded, whatever the scaled one kept.
    return Gradients(cotangents, cast(loss, jnp.float32), metrics, stats)


def _checked(returned: Any, batch_stats: Any) -> tuple[jax.Array, Any, Any]:
    """Return (loss, stats, metrics), or say what is wrong with the loss function."""
    try:
        loss, (stats, metrics) = returned
    except (TypeError, ValueError):
        raise ValueError(_SIGNATURE) from None
    if np.shape(loss) != () or not jnp.issubdtype(dtype_of(loss), jnp.floating):
        raise ValueError(
            "The loss must be a floating scalar, the mean over the batch, got "
            f"{dtype_of(loss)}{list(np.shape(loss))}."
        )
    stats = {} if stats is None else stats
    old, new = _signature(batch_stats), _signature(stats)
    if old != new:
        path = next(iter(set(old.items()) ^ set(new.items())), ("structure", ""))[0]
        raise ValueError(
            "`loss_fn` must return batch statistics of the structure it was given, "
            f"but {path!r} differs: given {old.get(path)}, returned {new.get(path)}."
        )
    # The state keeps its own containers: a FrozenDict for a dict would not do.
    found = dict(flatten(stats)[0])
    leaves = [jnp.asarray(found[path]) for path in old]
    stats = jax.tree.unflatten(jax.tree.structure(batch_stats), leaves)
    metrics = jax.tree.map(jnp.asarray, metrics)
    return jnp.asarray(loss), stats, metrics


def _signature(stats: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    found = flatten(stats)[0]
    return {path: (tuple(np.shape(x)), str(dtype_of(x))) for path, x in found}
