"""The tensors of a training state, each with a name, and a digest of all of them.

An arena is looked at slot by slot, so padding counts for nothing and a parameter has
the same digest wherever its slot lies. Whatever else the state holds (statistics,
counters, Optax state, key) is looked at leaf by leaf.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

from rjax import ops
from rjax.plan import Plan
from rjax.regions import REGIONS, Role
from rjax.state import RegionState
from rjax.trees import flatten

# The arenas of a state and the series of regions each holds.
ARENAS = {
    "master": "W", "compute": "A", "mu": "M", "nu": "V", "ema": "E",
    "ema_compute": "E_FP16",
}  # fmt: skip
_REGION_OF = {
    (info.series, info.role): info.region.name
    for info in REGIONS.values()
    if isinstance(info.role, Role)
}
_STATISTICS = {"mean": "B_PREV_MEAN", "var": "B_PREV_VAR"}
# Types that `ops.digest` reads as they are.
_WORDS = ("float32", "float16", "bfloat16", "int32", "uint32")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a training state, or one slot of its gradient.

    Attributes:
        field: of :class:`rjax.RegionState`, such as "master"; "gradient of" for those.
        path: of the parameter, or within the field; "" for a field of one array.
        shape: its shape.
        dtype: name of its dtype.
        region: name of the region it lies in, "" if it lies in none.

    Example:
        >>> Tensor("master", "fc/kernel", (3, 2), "float32", "W_FC_WEIGHT").name
        'master fc/kernel'
    """

    field: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    region: str

    @property
    def name(self) -> str:
        """Field and path: "master conv1/kernel"."""
        return f"{self.field} {self.path}".rstrip()


def tensors(plan: Plan, state: RegionState) -> tuple[Tensor, ...]:
    """Return the tensors of a state, in the order of :func:`digest`.

    Args:
        plan: the static layout.
        state: a state of it; only shapes and dtypes are looked at.

    Returns:
        Slots of the arenas first, then whatever else the state holds, leaf by leaf.

    Example:
        >>> import rjax
        >>> params = {"dense": {"kernel": jnp.ones((3, 2))}}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> found = tensors(plan, rjax.init_state(plan, params))
        >>> found[0].name, found[1].region
        ('master dense/kernel', 'A_FC_WEIGHT')
    """
    found: list[Tensor] = []
    for field, series in ARENAS.items():
        arena = getattr(state, field)
        if arena is None:
            continue
        for slot in _slots(plan, field):
            region = _REGION_OF[series, slot.part]
            dtype = str(arena.dtype)
            found.append(Tensor(field, slot.path, slot.shape, dtype, region))
    for field, path, leaf in _loose(state):
        region = _loose_region(field, path, leaf)
        found.append(Tensor(field, path, leaf.shape, str(leaf.dtype), region))
    return tuple(found)


def gradients(plan: Plan) -> tuple[Tensor, ...]:
    """Return the gradients of a plan, in the order of :func:`rjax.stages.digest_grads`.

    Example:
        >>> import rjax
        >>> params = {"dense": {"kernel": jnp.ones((3, 2))}}
        >>> [found] = gradients(rjax.make_plan(params, rjax.Config()))
        >>> found.name, found.region
        ('gradient of dense/kernel', 'G_FC_WEIGHT')
    """
    return tuple(
        Tensor(
            "gradient of", slot.path, slot.shape, "float32", _REGION_OF["G", slot.part]
        )
        for slot in plan.slots
    )


def digest(plan: Plan, state: RegionState) -> UInt32[Array, "tensors 2"]:
    """Return 64 bits, as two uint32, for every tensor of a state.

    Equal bits give equal digests on every platform and under any sharding; one changed
    bit always changes its tensor's digest (see :func:`rjax.ops.digest`). A pure
    function: jit it, or call it inside your own jitted function or `lax.scan`.

    Args:
        plan: the static layout.
        state: a state of it.

    Returns:
        uint32[tensors, 2], in the order of :func:`tensors`.

    Example:
        >>> import rjax
        >>> params = {"dense": {"kernel": jnp.ones((3, 2))}}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> state = rjax.init_state(plan, params)
        >>> other = dataclasses.replace(state, step=state.step + 1)
        >>> of = jax.jit(digest, static_argnums=0)
        >>> differs = np.asarray(of(plan, state) != of(plan, other)).any(axis=1)
        >>> [tensors(plan, state)[i].name for i in np.flatnonzero(differs)]
        ['step']
    """
    lanes = []
    for field in ARENAS:
        arena = getattr(state, field)
        if arena is not None:
            start = _start(plan, field)
            table = [(slot.offset - start, slot.size) for slot in _slots(plan, field)]
            lanes.append(ops.digest_slots(arena, table))
    lanes += [ops.digest(_words(leaf))[None] for _, _, leaf in _loose(state)]
    return jnp.concatenate(lanes)


def values(plan: Plan, state: RegionState) -> list[np.ndarray]:
    """Return the host arrays of :func:`tensors`: flat, 16-bit floats and keys as bits.

    This waits for the device.
    """
    found = []
    for field in ARENAS:
        arena = getattr(state, field)
        if arena is not None:
            start = _start(plan, field)
            host = _host(arena)
            found += [
                host[slot.offset - start : slot.offset - start + slot.size]
                for slot in _slots(plan, field)
            ]
    return found + [_host(leaf).reshape(-1) for _, _, leaf in _loose(state)]


def _host(leaf: jax.Array) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    found = np.asarray(leaf)
    return found.view(np.uint16) if leaf.dtype == jnp.bfloat16 else found


_HALVES = ("compute", "ema_compute")


def _slots(plan: Plan, field: str) -> list[Any]:
    return [slot for slot in plan.slots if slot.half or field not in _HALVES]


def _start(plan: Plan, field: str) -> int:
    """Return which element of a whole arena is the first of this one.

    Not from its length: what several devices share may be longer than the plan says.
    """
    return plan.bias_like if field in _HALVES else 0


def _loose(state: RegionState) -> list[tuple[str, str, jax.Array]]:
    """Return (field, path, leaf) of all that lies outside the arenas."""
    return [
        (field.name, path, leaf)
        for field in dataclasses.fields(state)
        if field.name not in ARENAS
        for path, leaf in flatten(getattr(state, field.name))[0]
    ]


def _loose_region(field: str, path: str, leaf: jax.Array) -> str:
    if field == "batch_stats":
        return _STATISTICS.get(path.rsplit("/", 1)[-1], "")
    if field == "results":
        return "R_RESULT_ACCUMULATED"
    scalar = leaf.ndim == 0 and field not in ("key", "frozen", "opt_state")
    names = {"float32": "S_SCALAR_FP32", "int32": "S_SCALAR_INT32"}
    return names.get(str(leaf.dtype), "") if scalar else ""


def _words(leaf: jax.Array) -> jax.Array:
    """Return an array's bits in a type that `ops.digest` reads, one to one."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if str(leaf.dtype) in _WORDS:
        return leaf
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    if leaf.dtype.itemsize > 4:  # two words an element
        return lax.bitcast_convert_type(leaf, jnp.uint32)
    raw = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
    return raw.astype(jnp.uint32)
