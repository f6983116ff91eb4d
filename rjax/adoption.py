"""Loss scaling, finite check and gated apply for a training loop of one's own.

On ordinary pytrees, with any optimizer, by the rules of the train step: the scale
multiplies the float32 loss before the first half-precision value of the backward pass;
gradients become float32, are averaged over devices, and only then unscaled; one flag
decides; an applied step moves all that it is given, a skipped one keeps every bit::

    view = rjax.compute_view(params)
    loss, grads = rjax.scaled_value_and_grad(loss_fn, scaling)(view, batch)
    state, scaling, applied = rjax.apply_gated(update, scaling, grads, state)

All of it is pure: call it inside `jit`, `lax.scan`, `vmap` or `shard_map`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rjax.config import Config, Policy
from rjax.gated import AxisName, names, vary, varying
from rjax.loss_scale import LossScale, check_scaling
from rjax.ops import cast
from rjax.ops.manual_axes import align
from rjax.plan import make_plan
from rjax.roles import Rule
from rjax.trees import check_floating, dtype_of, flatten
from rjax.vjp import differentiate

_ARRAYS = (jax.Array, np.ndarray)


def compute_view(
    params: Any, precision: str | Policy = "fp16", rule: Rule | None = None
) -> Any:
    """Cast float32 parameters to what the forward pass of a train step sees.

    Kernels and embeddings become half precision; biases, norm parameters and whatever
    the rule keeps stay float32. Equals `rjax.get_params(plan, state, "compute")`.

    Args:
        params: pytree of floating arrays.
        precision: "fp16", "bf16", "fp32" or an :class:`rjax.Policy`.
        rule: ``(path, leaf) -> rjax.Param | None``, as for :func:`rjax.make_plan`.

    Returns:
        The same tree.

    Raises:
        ValueError: for an unknown precision, an empty tree, or, by path, a leaf that
            is not floating.

    Example:
        >>> params = {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}
        >>> {k: v.dtype.name for k, v in compute_view(params).items()}
        {'bias': 'float32', 'kernel': 'float16'}
    """
    config = Config(precision=precision)
    plan = make_plan(params, config, rule=rule)
    half = config.policy.compute_dtype
    kinds = {slot.leaf: half if slot.half else jnp.float32 for slot in plan.slots}
    kinds |= {leaf.leaf: leaf.dtype for leaf in plan.frozen}
    leaves, treedef = jax.tree.flatten(params)
    cast_leaves = [cast(jnp.asarray(x), kinds[i]) for i, x in enumerate(leaves)]
    return treedef.unflatten(cast_leaves)


def scaled_value_and_grad(
    loss_fn: Callable[..., Any],
    scaling: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: AxisName | None = None,
) -> Callable[..., Any]:
    """Differentiate a loss like `jax.value_and_grad`, times a loss scale on the way.

    Give it half-precision weights (:func:`compute_view`, or your own cast) and update
    the float32 ones with what it returns. As in the train step, kernels that are given
    to :func:`rjax.ops.dense` as they come get a gradient that was never rounded to half
    precision.

    Args:
        loss_fn: ``(*args, **kwargs) -> loss``, a floating scalar, unscaled; with
            `has_aux`, ``-> (loss, aux)``.
        scaling: the scale of this step.
        argnums: which arguments to differentiate by, pytrees of floating arrays.
        has_aux: as for `jax.value_and_grad`.
        axis_name: of `shard_map` or `pmap`: average the gradients over it, in float32.
            The loss stays that of each device.

    Returns:
        A function of the same arguments that returns ``(loss, grads)``, or
        ``((loss, aux), grads)``: f32[], and gradients in float32, unscaled, neither
        checked nor clipped: hand them to :func:`apply_gated` first.

    Raises:
        ValueError: for a `scaling` that is no :class:`LossScale`; when called, for a
            loss that is no floating scalar, for a leaf that is not floating (by path),
            and, inside `shard_map`, for weights or a loss that are the same on devices
            whose gradients are to be averaged.

    Example:
        >>> loss = lambda w, x: (w * x).sum()
        >>> w, x = jnp.ones(2, jnp.float16), jnp.array([1e-7, 2.0], jnp.float16)
        >>> value, grads = scaled_value_and_grad(loss, LossScale.init())(w, x)
        >>> grads.dtype.name, float(grads[1])
        ('float32', 2.0)

    Source: `run_train_step` of the article, section 4, stages 1 to 5.
    """
    check_scaling(scaling)
    chosen = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def value_and_grad(*args: Any, **kwargs: Any) -> Any:
        # What makes the batch does not fuse with the step: as in `stages.begin`.
        args, kwargs = _separate(args), _separate(kwargs)
        leaves, treedef = jax.tree.flatten([_argument(args, i) for i in chosen])

        def scaled_loss(leaves: list[jax.Array]) -> Any:
            given = list(args)
            for i, value in zip(chosen, treedef.unflatten(leaves), strict=True):
                given[i] = value
            loss, aux = _loss_and_aux(loss_fn(*given, **kwargs), has_aux)
            _check_own(loss, leaves, axis_name)
            scale = align(loss, scaling.scale)[1]
            return loss.astype(jnp.float32) * scale, (loss, aux)

        varying = [vary(jnp.asarray(x), axis_name) for x in leaves]
        found = differentiate(scaled_loss, varying)
        cotangents, (loss, aux) = _separate(found)
        wide = _separate([cast(x, jnp.float32) for x in cotangents])
        if axis_name is not None:
            wide = _separate([lax.pmean(x, axis_name) for x in wide])
        grads = treedef.unflatten([x / align(x, scaling.scale)[1] for x in wide])
        loss = cast(loss, jnp.float32)
        grads = grads[0] if isinstance(argnums, int) else tuple(grads)
        return ((loss, aux) if has_aux else loss), grads

    return value_and_grad


def _separate(tree: Any) -> Any:
    """Return the tree, each of its arrays behind a barrier of its own.

    A joint one would make all of them vary over devices if one does (jax 0.10.2).
    """

    def apart(x: Any) -> Any:
        return lax.optimization_barrier(x) if isinstance(x, _ARRAYS) else x

    return jax.tree.map(apart, tree)


def _argument(args: tuple[Any, ...], i: int) -> Any:
    """Return an argument to differentiate by, or say what is wrong with it."""
    if not -len(args) <= i < len(args):
        raise ValueError(
            f"`argnums` names argument {i}, but {len(args)} positional arguments were "
            "given; pass what to differentiate by position."
        )
    for path, leaf in flatten(args[i])[0]:
        check_floating(path or f"argument {i}", leaf)
    return args[i]


def _loss_and_aux(returned: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    loss, aux = returned, None
    if has_aux:
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ValueError(
                "`loss_fn` must return (loss, aux) with `has_aux`=True, got "
                f"{type(returned).__name__}."
            )
        loss, aux = returned
    leaves = jax.tree.leaves(loss)
    whole = len(leaves) == 1 and leaves[0] is loss
    if not whole or np.shape(loss) or not jnp.issubdtype(dtype_of(loss), jnp.floating):
        kind = f"{dtype_of(loss)}{list(np.shape(loss))}" if whole else type(loss)
        raise ValueError(
            f"`loss_fn` must return a floating scalar, got {kind}; take the mean over "
            "the batch, and say has_aux=True if it returns more."
        )
    return jnp.asarray(loss), aux


def _check_own(
    loss: jax.Array, leaves: list[jax.Array], axis_name: AxisName | None
) -> None:
    """Raise a `ValueError` unless loss and weights are those of each device.

    The gradient of a weight that is the same on all would be summed over them by JAX
    itself, in half precision; that of a loss that was averaged already is a share of
    the mean, and would be averaged once more.
    """
    for leaf in leaves:
        apart = sorted(varying(loss) - varying(leaf))
        if apart:
            raise ValueError(
                f"The loss differs over the devices along {apart}, but weights do not: "
                "pass `axis_name`, so that gradients are averaged in float32."
            )
        shared = [n for n in names(axis_name or ()) if n in varying(leaf)]
        shared = [n for n in shared if n not in varying(loss)]
        if shared:
            raise ValueError(
                "`loss_fn` must return the loss of each device, but it is the same "
                f"along {shared}; average it outside, not within the function."
            )
