"""The front door for Flax NNX: modules in, pure trees between, modules out."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from rjax.losses import (
    Criterion,
    LossFn,
    cast_inputs,
    mean_loss,
    pair,
    training_options,
)
from rjax.silent import Float32Watch
from rjax.trees import dtype_of, flatten

_REMEDY = (
    "give those layers `dtype=jnp.float16` (their `param_dtype` stays), or keep the "
    "parameters in float32 by the path rule, rjax.Param(precision='float32')."
)


def nnx_variables(model: Any) -> tuple[Any, Any]:
    """Return what a plan is made from: the parameters and the running statistics.

    Args:
        model: a `flax.nnx.Module`; nothing of it changes.

    Returns:
        ``(params, batch_stats)``, nested dictionaries by attribute, whose keys are
        strings ("layers/0/kernel"). Parameters are the variables of type `nnx.Param`;
        statistics are all other variables but random states and what was sown. A
        variable that is used in two places comes once.

    Raises:
        ValueError: for anything but a module.

    Example:
        >>> from flax import nnx
        >>> params, batch_stats = nnx_variables(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
        >>> sorted(params), sorted(batch_stats)
        (['bias', 'scale'], ['mean', 'var'])
    """
    _, params, _, _, rest = _split(model)
    return _as_dict(params), _as_dict(rest)


def nnx_update(model: Any, params: Any, batch_stats: Any = None) -> None:
    """Put trained weights and statistics back into a module, in place.

    Args:
        model: the module that the plan was made from.
        params: from :func:`rjax.get_params`.
        batch_stats: from :func:`rjax.get_batch_stats`; `None` leaves the module's.

    Returns:
        Nothing.

    Raises:
        ValueError: for anything but a module, or, by path, a tree of another structure.

    Example:
        >>> import jax, rjax
        >>> from flax import nnx
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> params, stats = rjax.nnx_variables(model)
        >>> rjax.nnx_update(model, jax.tree.map(lambda x: 0 * x + 3, params))
        >>> model.bias[...].tolist()
        [3.0]
    """
    from flax import nnx

    _, old_params, _, _, old_rest = _split(model)
    nnx.update(model, _filled(old_params, params, "params"))
    if batch_stats is not None:
        nnx.update(model, _filled(old_rest, batch_stats, "batch_stats"))


def nnx_loss(model: Any, criterion: Criterion) -> LossFn:
    """Make a loss function of a Flax NNX module and a criterion.

    The batch is a pair ``(inputs, targets)``. Floating inputs are cast to the compute
    precision, running statistics are collected, and every random stream of the module
    gets a key of its own, made from that of the step: its counts start at 0 in each
    step, so a resumed run draws the same numbers. The module is called in training
    mode, as after ``model.train()``. Layers that would compute in float32 with
    half-precision kernels, as those with a bias and no `dtype` do, are named in a
    warning when the step is traced.

    Args:
        model: a `flax.nnx.Module`. Only its structure is kept: its arrays do not change
            and are not trained; see :func:`nnx_variables` and :func:`nnx_update`.
        criterion: ``(outputs, targets) -> loss`` or ``-> (loss, metrics)``; a loss
            per example is averaged.

    Returns:
        ``(params, batch_stats, batch, key) -> (loss, (new_batch_stats, metrics))``.

    Raises:
        ValueError: for anything but a module; when called, for a batch that is no pair,
            a criterion that returns no loss, or a tree of another structure.

    Example:
        >>> import rjax
        >>> from flax import nnx
        >>> model = nnx.Linear(4, 2, dtype=jnp.float16, rngs=nnx.Rngs(0))
        >>> params, batch_stats = nnx_variables(model)
        >>> plan = rjax.make_plan(params, rjax.Config(), batch_stats)
        >>> loss_fn = nnx_loss(model, rjax.ops.softmax_cross_entropy)
        >>> step = jax.jit(rjax.make_train_step(loss_fn, plan))
        >>> batch = jnp.ones((8, 4)), jnp.zeros(8, jnp.int32)
        >>> state, report = step(rjax.init_state(plan, params, batch_stats), batch)
        >>> nnx_update(model, rjax.get_params(plan, state))
    """
    from flax import nnx

    graphdef, *states = _split(model)
    # What is kept has no arrays of parameters and statistics, only their places.
    params_like, rest_like = jax.eval_shape(lambda: (states[0], states[3]))
    streams, sown = states[1], states[2]
    options = training_options(model)
    takes_rngs = "rngs" in inspect.signature(type(model).__call__).parameters
    watch = Float32Watch(f"nnx_loss of {type(model).__name__}", _REMEDY)

    def forward(params: Any, batch_stats: Any, inputs: Any, key: jax.Array) -> Any:
        copy = nnx.merge(
            graphdef,
            _filled(params_like, params, "params"),
            _reseeded(streams, key),
            sown,
            _filled(rest_like, batch_stats, "batch_stats"),
        )
        copy.train()
        extra = {"rngs": nnx.Rngs(key)} if takes_rngs else {}
        outputs = copy(inputs, **options, **extra)
        return outputs, _as_dict(_split(copy)[-1])

    def loss_fn(params: Any, batch_stats: Any, batch: Any, key: jax.Array) -> Any:
        inputs, targets = pair(batch, "nnx_loss")
        inputs = cast_inputs(inputs, params)
        watch.look(forward, params, batch_stats, inputs, key)
        outputs, stats = forward(params, batch_stats, inputs, key)
        loss, metrics = mean_loss(criterion, outputs, targets)
        return loss, (stats, metrics)

    return loss_fn


def _split(model: Any) -> Any:
    """Return the graph, and parameters, random states, what was sown, and the rest."""
    from flax import nnx

    if not isinstance(model, nnx.Module):
        raise ValueError(
            f"`model` must be a flax.nnx.Module, got {type(model).__name__}; "
            "rjax.linen_loss takes Linen modules."
        )
    return nnx.split(model, nnx.Param, nnx.RngState, nnx.Intermediate, ...)


def _keys(path: Any) -> tuple[str, ...]:
    """Return a leaf's place in our trees: without the `value` of its variable."""
    names = (jax.tree_util.keystr((key,), simple=True) for key in path)
    attribute = jax.tree_util.GetAttrKey
    return tuple(
        name
        for key, name in zip(path, names, strict=True)
        if not (isinstance(key, attribute) and key.name == "value")
    )


def _as_dict(state: Any) -> dict[str, Any]:
    """Return a state as nested dictionaries of arrays."""
    tree: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        *modules, name = _keys(path)
        place = tree
        for module in modules:
            place = place.setdefault(module, {})
        place[name] = leaf
    return tree


def _filled(like: Any, tree: Any, name: str) -> Any:
    """Return a state of the structure of another with the values of our tree."""
    found, treedef = jax.tree_util.tree_flatten_with_path(like)
    paths = ["/".join(_keys(path)) for path, _ in found]
    given = dict(flatten({} if tree is None else tree)[0])
    missing = [path for path in paths if path not in given]
    extra = sorted(set(given) - set(paths))
    if missing or extra:
        wrong = f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r} too much"
        raise ValueError(
            f"`{name}` must have the structure of the module, but {wrong}; take it "
            "from rjax.nnx_variables(model)."
        )
    return treedef.unflatten([given[path] for path in paths])


def _reseeded(streams: Any, key: jax.Array) -> Any:
    """Return random states with keys made from one and counts at 0."""
    leaves, treedef = jax.tree.flatten(streams)
    for i, leaf in enumerate(leaves):
        if jnp.issubdtype(dtype_of(leaf), jax.dtypes.prng_key):
            own = jax.random.fold_in(key, i)
            leaves[i] = jax.random.split(own, leaf.shape) if leaf.shape else own
        else:
            leaves[i] = jnp.zeros_like(leaf)
    return treedef.unflatten(leaves)
