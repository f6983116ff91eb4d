"""Loss functions of the kind the train step takes, from what people have."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rjax.trees import dtype_of

LossFn = Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, tuple[Any, Any]]]


def stateless_loss(f: Callable[[Any, Any], Any]) -> LossFn:
    """Lift ``f(params, batch) -> loss`` or ``-> (loss, metrics)`` to a loss function.

    Args:
        f: the loss of a model without running statistics or randomness.

    Returns:
        ``(params, batch_stats, batch, key) -> (loss, (batch_stats, metrics))``.

    Example:
        >>> loss_fn = stateless_loss(lambda params, batch: params["w"].sum() * batch)
        >>> loss_fn({"w": jnp.ones(2)}, {}, 3.0, None)
        (Array(6., dtype=float32), ({}, {}))
    """

    def loss_fn(params: Any, batch_stats: Any, batch: Any, key: jax.Array) -> Any:
        del key
        returned = f(params, batch)
        loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
        return loss, (batch_stats, metrics)

    return loss_fn


def linen_loss(module: Any, criterion: Callable[[Any, Any], Any]) -> LossFn:
    """Make a loss function of a Flax Linen module and a criterion.

    The batch is a pair ``(inputs, targets)``. Floating inputs are cast to the compute
    precision (that of the first kernel), running statistics are collected, and a
    dropout key is provided.

    Args:
        module: a `flax.linen.Module`; called with ``train=True`` if it takes that.
        criterion: ``(outputs, targets) -> loss`` or ``-> (loss, metrics)``; a loss
            per example is averaged.

    Returns:
        ``(params, batch_stats, batch, key) -> (loss, (new_batch_stats, metrics))``.

    Raises:
        ValueError: when called, for a batch that is no pair.

    Example:
        ``loss_fn = rjax.linen_loss(rjax.nn.MLP((64,), 10), criterion)``
    """
    takes_train = "train" in inspect.signature(type(module).__call__).parameters
    options = {"train": True} if takes_train else {}

    def loss_fn(params: Any, batch_stats: Any, batch: Any, key: jax.Array) -> Any:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError("`batch` must be a pair (inputs, targets) for linen_loss.")
        inputs, targets = batch
        variables = {"params": params}
        if jax.tree.leaves(batch_stats):
            variables["batch_stats"] = batch_stats
        outputs, moved = module.apply(
            variables,
            _cast_inputs(inputs, params),
            rngs={"dropout": key},
            mutable=["batch_stats"],
            **options,
        )
        returned = criterion(outputs, targets)
        loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
        loss = jnp.mean(jnp.asarray(loss).astype(jnp.float32))
        return loss, (moved.get("batch_stats", batch_stats), metrics)

    return loss_fn


def _cast_inputs(inputs: Any, params: Any) -> Any:
    """Cast floating inputs to the precision kernels have in the view."""
    kinds = [dtype_of(leaf) for leaf in jax.tree.leaves(params) if np.ndim(leaf) >= 2]
    kind = min(kinds, key=lambda dtype: dtype.itemsize, default=jnp.dtype(jnp.float32))

    def narrowed(x: Any) -> Any:
        floating = jnp.issubdtype(dtype_of(x), jnp.floating)
        return jnp.asarray(x).astype(kind) if floating else x

    return jax.tree.map(narrowed, inputs)
