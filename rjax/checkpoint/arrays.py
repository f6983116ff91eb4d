"""The arrays of a state by name, on the host, and a state made of them again.

What is kept does not depend on devices: arenas have the plan's length, without the
padding that a number of devices needs, and random keys are their words.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from rjax.checkpoint.errors import CheckpointError
from rjax.parallel import gather
from rjax.parallel.checks import check_state
from rjax.parallel.placement import SHARDED
from rjax.plan import Plan
from rjax.state import RegionState, init_state
from rjax.trees import check_distinct, flatten

# Array, and the generator of a random key, by name.
Kinds = Mapping[str, str | None]


def take(plan: Plan, state: RegionState) -> RegionState:
    """Return a copy of a state on its devices, which no step takes over.

    Nothing waits for it. Of a state over several processes it is a copy of the whole
    on a device of this one, and every process has to call this.

    Raises:
        ValueError: for a state of another plan, or two leaves of one name.
    """
    check_state(plan, state)
    check_distinct("state", flatten(state)[0])
    if any(not x.is_fully_addressable for x in jax.tree.leaves(state)):
        return gather(plan, state)
    return _copy(state)


@jax.jit
def _copy(state: RegionState) -> RegionState:
    return jax.tree.map(jnp.copy, state)


def to_host(plan: Plan, state: RegionState) -> dict[str, np.ndarray]:
    """Return the arrays of a state by name; this waits for them."""
    found = {}
    for name, leaf in flatten(state)[0]:
        host = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        found[name] = host[: plan.n] if name in SHARDED else host
    return found


def kinds(state: RegionState) -> dict[str, str | None]:
    """Return, for every array's name, the generator that it is a key of, if any."""
    return {
        name: generator(leaf) if is_key(leaf) else None
        for name, leaf in flatten(state)[0]
    }


def is_key(leaf: Any) -> bool:
    """Whether an array holds random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def generator(keys: Any) -> str:
    """Return the name of the generator of random keys, or of their shape."""
    found: list[str] = []
    # JAX tells it of arrays alone, traced ones included.
    jax.eval_shape(lambda x: found.append(str(jax.random.key_impl(x))), keys)
    return found[0]


def blank(plan: Plan, arrays: Mapping[str, np.ndarray], keys: Kinds) -> RegionState:
    """Return the shapes of a fresh state of a plan.

    Args:
        plan: the static layout.
        arrays: of a saved state; what the plan does not know, the statistics, is like
            it.
        keys: from :func:`kinds`.
    """
    leaves = {leaf.leaf: leaf for leaf in (*plan.slots, *plan.frozen)}
    shapes = [
        jax.ShapeDtypeStruct(leaves[i].shape, jnp.float32) for i in range(len(leaves))
    ]
    params = jax.tree.unflatten(plan.treedef, shapes)
    stats = nested(
        {
            name.partition("/")[2]: jax.ShapeDtypeStruct(x.shape, x.dtype)
            for name, x in arrays.items()
            if name.startswith("batch_stats/")
        }
    )

    def fresh(params: Any, stats: Any) -> RegionState:
        key = jax.random.key(0, impl=keys["key"])
        return init_state(plan, params, stats, seed=key)

    return jax.eval_shape(fresh, params, stats)


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree of dictionaries by paths such as "conv1/kernel".

    Example:
        >>> nested({"a/b": 1, "a/c": 2, "d": 3})
        {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        functools.reduce(lambda at, key: at.setdefault(key, {}), folders, tree)[
            name
        ] = leaf
    return tree


def differences(
    plan: Plan, like: RegionState, arrays: Mapping[str, np.ndarray], keys: Kinds
) -> list[str]:
    """Return in what arrays are not those of a state like another."""
    wanted = {name: _kind(plan, name, leaf) for name, leaf in flatten(like)[0]}
    found = {
        name: (x.shape, keys.get(name) or str(x.dtype)) for name, x in arrays.items()
    }
    words = []
    for name in dict.fromkeys([*found, *wanted]):
        if name not in found:
            words.append(f"{name} is not in it")
        elif name not in wanted:
            words.append(f"{name} is in it alone")
        elif found[name] != wanted[name]:
            old, new = (f"{d}{list(shape)}" for shape, d in (found[name], wanted[name]))
            words.append(f"{name} is {old}, not {new}")
    return words


def _kind(plan: Plan, name: str, leaf: Any) -> tuple[tuple[int, ...], str]:
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return data.shape, generator(leaf)
    return (plan.n,) if name in SHARDED else leaf.shape, str(leaf.dtype)


def assemble(
    like: RegionState, arrays: Mapping[str, np.ndarray], keys: Kinds
) -> RegionState:
    """Return a state of the arrays: of the structure, and in the places, of another.

    Args:
        like: a state, or its shapes.
        arrays: by name, of its shapes; arenas may lack padding.
        keys: from :func:`kinds`.
    """
    named, treedef = flatten(like)
    leaves = [_placed(name, leaf, arrays[name], keys[name]) for name, leaf in named]
    return jax.tree.unflatten(treedef, leaves)


def _placed(name: str, like: Any, host: np.ndarray, impl: str | None) -> jax.Array:
    if name in SHARDED:
        host = np.pad(host, (0, len(like) - len(host)))
    made = _put(host, like)
    if impl is not None:
        return jax.random.wrap_key_data(made, impl=impl)
    # A step is compiled anew for an array of another promotion.
    return jnp.asarray(made.item()) if like.weak_type and not made.ndim else made


def _put(host: np.ndarray, like: Any) -> jax.Array:
    """Return an array in a buffer of its own, where another one lies."""
    sharding = like.sharding if isinstance(like, jax.Array) else None
    if sharding is None or not like.committed:
        return jnp.array(host)
    if not sharding.is_fully_addressable:
        return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)
    if isinstance(sharding, SingleDeviceSharding) or not is_key(like):
        return jax.device_put(jnp.array(host), sharding)
    # A key has an axis less than its words.
    return jax.device_put(jnp.array(host), jax.random.key_data(like).sharding)


def refuse(path: Any, words: list[str]) -> CheckpointError:
    """Return the complaint that a checkpoint is of another layout."""
    more = f" and {len(words) - 5} more" if len(words) > 5 else ""
    return CheckpointError(
        f"{path} is of another layout than `plan`: {'; '.join(words[:5])}{more}. Make "
        "the plan as it was then, or take the weights alone with "
        "rjax.checkpoint.load_weights and rjax.replace_params."
    )
