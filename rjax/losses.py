"""Loss functions of the kind the train step takes, from what people have."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rjax.silent import Float32Watch
from rjax.trees import dtype_of

LossFn = Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, tuple[Any, Any]]]
Criterion = Callable[[Any, Any], Any]

# What modules call the argument that says whether they are trained, and its value.
_TRAINING = {"train": True, "training": True, "deterministic": False}
_REMEDY = (
    "give those layers a half-precision `dtype`, or keep the parameters in float32 by "
    "the path rule, rjax.Param(precision='float32')."
)


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


def linen_loss(
    module: Any,
    criterion: Criterion,
    *,
    collections: Sequence[str] | None = None,
    rngs: Sequence[str] = ("dropout",),
) -> LossFn:
    """Make a loss function of a Flax Linen module and a criterion.

    The batch is a pair ``(inputs, targets)``. Floating inputs are cast to the compute
    precision (that of the first kernel), running statistics are collected, and a
    dropout key is provided. Layers that would compute in float32 with half-precision
    kernels, as stock ones with a bias and no `dtype` do, are named in a warning when
    the step is traced.

    Args:
        module: a `flax.linen.Module`; called with ``train=True``, ``training=True`` or
            ``deterministic=False`` if it takes that.
        criterion: ``(outputs, targets) -> loss`` or ``-> (loss, metrics)``; a loss
            per example is averaged.
        collections: mutable collections that the step carries, as the dictionary
            ``{name: collection}`` in place of `batch_stats`; `None` for the collection
            "batch_stats" alone, as it is.
        rngs: names of the random streams, each of which gets a key of its own.

    Returns:
        ``(params, batch_stats, batch, key) -> (loss, (new_batch_stats, metrics))``.

    Raises:
        ValueError: when called, for a batch that is no pair, statistics that the plan
            was made without, or a criterion that returns no loss.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> model = rjax.nn.MLP((8,), num_classes=10)
        >>> batch = jnp.zeros((2, 8, 8, 1)), jnp.zeros(2, int)
        >>> params = model.init(jax.random.key(0), batch[0])["params"]
        >>> loss_fn = rjax.linen_loss(model, rjax.ops.softmax_cross_entropy)
        >>> loss, (stats, metrics) = loss_fn(params, {}, batch, jax.random.key(1))
        >>> f"{loss:.2f}"
        '2.30'
    """
    options = training_options(module)
    kept = ("batch_stats",) if collections is None else tuple(collections)
    watch = Float32Watch(f"linen_loss of {type(module).__name__}", _REMEDY)

    def forward(params: Any, batch_stats: Any, inputs: Any, key: jax.Array) -> Any:
        carried = {"batch_stats": batch_stats} if collections is None else batch_stats
        variables = {
            name: tree for name, tree in carried.items() if jax.tree.leaves(tree)
        }
        return module.apply(
            {"params": params, **variables},
            inputs,
            rngs=_streams(rngs, key),
            mutable=list(kept),
            **options,
        )

    def loss_fn(params: Any, batch_stats: Any, batch: Any, key: jax.Array) -> Any:
        inputs, targets = pair(batch, "linen_loss")
        inputs = cast_inputs(inputs, params)
        _check_collections(batch_stats, collections)
        watch.look(forward, params, batch_stats, inputs, key)
        outputs, moved = forward(params, batch_stats, inputs, key)
        loss, metrics = mean_loss(criterion, outputs, targets)
        stats = {**batch_stats, **moved} if collections else moved.get("batch_stats")
        stats = batch_stats if stats is None else stats
        if jax.tree.leaves(stats) and not jax.tree.leaves(batch_stats):
            raise ValueError(
                f"{type(module).__name__} has running statistics; give them to "
                "rjax.make_plan and rjax.init_state, batch_stats="
                "variables['batch_stats']."
            )
        return loss, (stats, metrics)

    return loss_fn


def _streams(names: Sequence[str], key: jax.Array) -> dict[str, jax.Array]:
    """Return a key for each stream; the first has the step's own."""
    later = {n: jax.random.fold_in(key, i) for i, n in enumerate(names) if i}
    return {name: key for name in names[:1]} | later


def _check_collections(carried: Any, collections: Sequence[str] | None) -> None:
    if collections is None:
        return
    names = sorted(carried) if isinstance(carried, Mapping) else type(carried).__name__
    if names != sorted(collections):
        raise ValueError(
            "`batch_stats` must be the dictionary of the collections "
            f"{sorted(collections)} that linen_loss was made for, got {names}; give it "
            "to rjax.make_plan and rjax.init_state."
        )


def training_options(module: Any) -> dict[str, bool]:
    """Return the arguments that tell a module's call that it is being trained."""
    takes = inspect.signature(type(module).__call__).parameters
    return {name: value for name, value in _TRAINING.items() if name in takes}


def pair(batch: Any, door: str) -> tuple[Any, Any]:
    """Return inputs and targets, or say that a batch is no pair."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ValueError(f"`batch` must be a pair (inputs, targets) for {door}.")
    return batch[0], batch[1]


def mean_loss(criterion: Criterion, outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return the mean of a criterion, f32[], and its metrics."""
    returned = criterion(outputs, targets)
    loss, metrics = returned, {}
    if isinstance(returned, tuple) and len(returned) == 2:
        loss, metrics = returned
    single = jax.tree.structure(loss) == jax.tree.structure(0)
    if not single or not jnp.issubdtype(dtype_of(loss), jnp.floating):
        raise ValueError(
            "`criterion` must return a floating loss, or (loss, metrics), got "
            f"{dtype_of(loss) if single else type(loss).__name__}."
        )
    return jnp.mean(jnp.asarray(loss).astype(jnp.float32)), metrics


def cast_inputs(inputs: Any, params: Any) -> Any:
    """Cast floating inputs to the precision kernels have in the view."""
    kinds = [dtype_of(leaf) for leaf in jax.tree.leaves(params) if np.ndim(leaf) >= 2]
    kind = min(kinds, key=lambda dtype: dtype.itemsize, default=jnp.dtype(jnp.float32))

    def narrowed(x: Any) -> Any:
        floating = jnp.issubdtype(dtype_of(x), jnp.floating)
        return jnp.asarray(x).astype(kind) if floating else x

    return jax.tree.map(narrowed, inputs)
