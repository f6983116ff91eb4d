"""A state of one's own moves whole, or not at all."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from rjax.gate import rewritten
from rjax.loss_scale import LossScale, check_scaling
from rjax.ops.bits import is_finite
from rjax.ops.manual_axes import align
from rjax.trees import dtype_of, flatten

AxisName = str | Sequence[str]


def apply_gated(
    update: Callable[[Any, Any], Any],
    scaling: LossScale,
    grads: Any,
    state: Any,
    check: Any = (),
    axis_name: AxisName | None = None,
) -> tuple[Any, LossScale, Bool[Array, ""]]:
    """Move a state by its gradients if all of them are finite, else keep every bit.

    One `lax.cond` on one flag: a NaN or an infinity in any gradient, or in `check`,
    skips the update as a whole, and the rule yields the scale of the next step.

    Args:
        update: ``(grads, state) -> state``: optimizer, clip, EMA, counters. It runs
            only if the step counts, and returns the structure it was given.
        scaling: the scale of this step.
        grads: pytree of unscaled gradients, not clipped yet; of several losses, all.
        state: pytree of arrays that moves as a whole: weights, optimizer state, and so
            on.
        check: more that has to be finite, such as new running statistics or a learning
            rate.
        axis_name: of `shard_map` or `pmap`: what is bad on one device skips the step on
            all of them.

    Returns:
        The next state, the next :class:`LossScale`, and bool[], whether it was applied.

    Raises:
        ValueError: for a `scaling` that is no :class:`LossScale`; by path, for an
            update that returns another structure, shape or dtype; for a state that
            would come to differ over devices.

    Example:
        >>> step = lambda g, w: w - 0.5 * g
        >>> scaling, w = LossScale.init(), jnp.ones(1)
        >>> w, scaling, applied = apply_gated(step, scaling, jnp.array([jnp.inf]), w)
        >>> w, float(scaling.scale), bool(applied)
        (Array([1.], dtype=float32), 4096.0, False)

    Source: `run_train_step` of the article, section 4, stages 6 to 10.
    """
    check_scaling(scaling)
    flag = _any_not_finite((grads, check))
    if axis_name is not None:
        flag = lax.pmax(vary(flag.astype(jnp.int32), axis_name), axis_name) > 0
    found, treedef = flatten(state)
    old = [jnp.asarray(leaf) for _, leaf in found]
    paths = [path for path, _ in found]
    for path, leaf in zip(paths, old, strict=True):
        _check_agreement(path, leaf, flag)

    def moved(old: list[jax.Array], grads: Any) -> list[jax.Array]:
        new = flatten(update(grads, treedef.unflatten(old)))[0]
        _check_paths(paths, [path for path, _ in new])
        return [
            _like(path, leaf, before)
            for (path, leaf), before in zip(new, old, strict=True)
        ]

    def kept(old: list[jax.Array], grads: Any) -> list[jax.Array]:
        del grads
        return [rewritten(leaf) for leaf in old]

    new = lax.cond(flag, kept, moved, old, grads)
    return treedef.unflatten(new), scaling.next(flag), ~flag


def names(axis_name: AxisName) -> tuple[str, ...]:
    """Return one axis name, or several, as a tuple."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def varying(x: jax.Array) -> frozenset[str]:
    """Return the manual mesh axes that an array is known to differ over."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(x: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Return x as one that differs over devices, where `shard_map` keeps account.

    The gradient of one that does not is summed over them by JAX itself, in half
    precision.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    wanted = names(axis_name or ())
    missing = tuple(n for n in wanted if n in manual and n not in varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _any_not_finite(tree: Any) -> jax.Array:
    flag = jnp.zeros((), jnp.bool_)
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(dtype_of(leaf), jnp.floating):
            flag, bad = align(flag, ~jnp.all(is_finite(jnp.asarray(leaf))))
            flag |= bad
    return flag


def _check_agreement(path: str, leaf: jax.Array, flag: jax.Array) -> None:
    apart = varying(flag) - varying(leaf)
    if apart:
        raise ValueError(
            f"`state` leaf {path!r} is the same on all devices along {sorted(apart)}, "
            "but gradients or `check` differ over them; pass `axis_name` here and to "
            "scaled_value_and_grad."
        )


def _check_paths(old: list[str], new: list[str]) -> None:
    if old == new:
        return
    lacks = [path for path in old if path not in set(new)]
    extra = [path for path in new if path not in set(old)]
    wrong = f"lacks {lacks[0]!r}" if lacks else f"has {(extra or new)[0]!r} too much"
    raise ValueError(
        "`update` must return the structure of `state`, but what it returned "
        f"{wrong}; return (grads, state) -> state with the same leaves."
    )


def _like(path: str, new: Any, old: jax.Array) -> jax.Array:
    """Return a moved leaf in the type of the old one, or say how it differs."""
    new = jnp.asarray(new)
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ValueError(
            "`update` must keep shapes and dtypes, but `state` leaf "
            f"{path!r} was {old.dtype}{list(old.shape)} and became "
            f"{new.dtype}{list(new.shape)}."
        )
    apart = varying(new) - varying(old)
    if apart:
        raise ValueError(
            f"`state` leaf {path!r} would come to differ over devices along "
            f"{sorted(apart)}; average the gradients, by `axis_name` of "
            "scaled_value_and_grad."
        )
    return align(new, old)[0]
