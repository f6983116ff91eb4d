"""How a state and a batch lie on the devices of a mesh, and how they get there."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from rjax.ops.slots import ROW
from rjax.parallel.checks import (
    Axis,
    check_axes,
    check_mesh,
    check_share,
    check_state,
    is_explicit,
)
from rjax.plan import Plan
from rjax.state import RegionState, copied

# The arenas that `shard_optimizer` cuts; the half copies stay whole on every device.
SHARDED = ("master", "mu", "nu", "ema")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the arrays of a step lie on its devices.

    Attributes:
        plan: the static layout of the arenas.
        mesh: the devices.
        axes: of the mesh, that the batch is split over.
        shard_optimizer: whether the arenas :data:`SHARDED` are cut into ranges.
    """

    plan: Plan
    mesh: Mesh
    axes: tuple[str, ...]
    shard_optimizer: bool

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    @property
    def length(self) -> int:
        """Elements of a float32 arena over all devices."""
        return arena_length(self.plan, self.devices if self.shard_optimizer else 1)

    def check_context(self) -> None:
        """Raise a `ValueError` where cut arenas would be lost among explicit types."""
        if self.shard_optimizer and is_explicit(jax.sharding.get_abstract_mesh()):
            raise ValueError(
                "`shard_optimizer` has its arrays on a mesh of automatic axes, which "
                "JAX does not mix with those of `jax.set_mesh`; set no mesh, or one "
                "made with `axis_types=(jax.sharding.AxisType.Auto,)`."
            )

    def state_specs(self, state: RegionState) -> RegionState:
        """Return the partition of every field of a state, `None` for one it lacks."""
        names = SHARDED if self.shard_optimizer else ()
        specs = {
            f.name: PartitionSpec(self.axes) if f.name in names else PartitionSpec()
            for f in dataclasses.fields(state)
        }
        empty = {name: None for name in specs if getattr(state, name) is None}
        return RegionState(**{**specs, **empty})

    def laid_out(self, tree: Any, specs: Any) -> Any:
        """Return traced arrays whose types agree with the mesh, if it is in types.

        Args:
            tree: pytree of arrays.
            specs: their partition, a prefix of the tree.
        """

        def lay(spec: PartitionSpec, part: Any) -> Any:
            return jax.tree.map(functools.partial(self._lay, spec), part)

        return jax.tree.map(lay, specs, tree, is_leaf=_is_spec)

    def _lay(self, spec: PartitionSpec, x: Any) -> jax.Array:
        x = jnp.asarray(x)
        there: Any = jax.typeof(x).sharding.mesh
        if is_explicit(self.mesh):
            there = self.mesh
        if not is_explicit(there):
            return x
        return jax.sharding.reshard(x, NamedSharding(there, spec))


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def arena_length(plan: Plan, devices: int) -> int:
    """Return the elements of an arena that so many devices share, padding included.

    The plan's, if they can take equal ranges of it; else whole rows for each.
    """
    if plan.n % devices == 0:
        return plan.n
    return -(-plan.n // (ROW * devices)) * ROW * devices


def automatic(mesh: Mesh) -> Mesh:
    """Return the mesh with axes that are no part of types."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def place(layout: Layout, state: RegionState) -> RegionState:
    """Put a state where a step wants it; see :meth:`DataParallelStep.place`."""
    layout.check_context()
    check_state(layout.plan, state)
    state = _resized(layout.plan, state, layout.length)

    def put(spec: PartitionSpec, part: Any) -> Any:
        return _put(part, NamedSharding(layout.mesh, spec))

    return jax.tree.map(put, layout.state_specs(state), state, is_leaf=_is_spec)


def gather(plan: Plan, state: RegionState) -> RegionState:
    """Return a state as one device has it: every arena whole, without more padding.

    For :func:`rjax.make_train_step`, and for what looks at a state from outside.
    Whatever moves a state between steps over other devices need not gather it:
    :meth:`DataParallelStep.place` takes a state of any step.

    Args:
        plan: the static layout.
        state: of any step of the plan.

    Returns:
        A state in buffers of its own, on the first of this process's devices.

    Raises:
        ValueError: for a state of another plan.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> loss_fn = rjax.stateless_loss(lambda p, x: jnp.float32(x @ p["w"]).mean())
        >>> state, x = rjax.init_state(plan, params), jnp.ones((3, 4), "float16")
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> options = {"shard_optimizer": True}
        >>> step = rjax.parallel.data_parallel(loss_fn, plan, mesh, **options)
        >>> state = rjax.parallel.gather(plan, step.place(state))
        >>> state.master.shape == (plan.n,)
        True
    """
    check_state(plan, state)
    there = state.master.sharding.addressable_devices
    device = min(there, key=lambda device: device.id)
    state = _resized(plan, state, plan.n)
    return _put(state, SingleDeviceSharding(device))


def _resized(plan: Plan, state: RegionState, length: int) -> RegionState:
    """Return a state whose arenas have the padding that a length needs."""
    arenas = {name: getattr(state, name) for name in SHARDED}
    for name, arena in arenas.items():
        if arena is None or len(arena) == length:
            continue
        host = _host(arena)
        if host[plan.n :].any():
            raise ValueError(
                f"`state` has {len(arena)} elements in an arena, more than the "
                f"{plan.n} of `plan`; pass the plan that it was made with."
            )
        arenas[name] = np.pad(host[: plan.n], (0, length - plan.n))
    return dataclasses.replace(state, **arenas)


def _put(tree: Any, sharding: Any) -> Any:
    """Put arrays somewhere, in buffers of their own: either may be given away.

    `jax.device_put` would share those that lie there already, and `may_alias` is no
    help with replicas (0.10.2 to 0.12). Over several processes each has the whole.
    """
    leaves = jax.tree.leaves(tree)
    here = [x for x in leaves if isinstance(x, jax.Array)]
    if all(s.is_fully_addressable for s in (sharding, *(x.sharding for x in here))):
        return jax.device_put(jax.jit(copied)(tree), sharding)
    return jax.tree.map(functools.partial(_put_part, sharding), tree)


def _put_part(sharding: Any, x: Any) -> jax.Array:
    host = _host(x)
    if sharding.is_fully_addressable:
        made = jax.device_put(host, sharding)
    else:
        made = jax.make_array_from_callback(host.shape, sharding, host.__getitem__)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return (
        jax.random.wrap_key_data(made, impl=jax.random.key_impl(x)) if is_key else made
    )


def _host(x: Any) -> np.ndarray:
    """Return a whole array on the host, wherever its parts lie; a key as its data."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            from jax.experimental import multihost_utils

            return np.asarray(multihost_utils.process_allgather(x, tiled=True))
        x = x.addressable_data(0)
    return np.array(x)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Put a whole copy of every array on every device of a mesh.

    Equals ``jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))``, in buffers of
    their own: a step may be given the copies.

    Args:
        tree: pytree of arrays, such as a state from :func:`rjax.init_state`.
        mesh: the devices.

    Returns:
        The tree, of arrays on every device of the mesh.

    Raises:
        ValueError: for anything but a mesh.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> rjax.parallel.replicate({"w": jnp.ones(2)}, mesh)["w"].is_fully_replicated
        True
    """
    check_mesh(mesh)
    return _put(tree, NamedSharding(mesh, PartitionSpec()))


def shard_batch(batch: Any, mesh: Mesh, axis: Axis = "data") -> Any:
    """Give every device of a mesh an equal share of a batch, in order.

    Where the devices are those of several processes (`jax.distributed`), each process
    gives what its own devices take, as much as every other.

    Args:
        batch: pytree of arrays `[n, ...]`, NumPy's or JAX's.
        mesh: the devices.
        axis: of the mesh, or axes, to split it over.

    Returns:
        The same arrays, sharded over their leading axis.

    Raises:
        ValueError: for a leaf whose leading size the number of devices does not
            divide, anything but a mesh, or an axis it does not have.

    Example:
        >>> import jax.numpy as jnp
        >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> shard_batch({"x": jnp.zeros((4, 2))}, mesh)["x"].sharding.spec
        P('data',)
    """
    axes = check_axes(mesh, axis)
    sharding = NamedSharding(mesh, PartitionSpec(axes))
    own = [d.process_index == jax.process_index() for d in mesh.devices.flat]
    check_share(batch, sum(own))
    if sharding.is_fully_addressable:
        return jax.device_put(batch, sharding)
    put = functools.partial(jax.make_array_from_process_local_data, sharding)
    return jax.tree.map(lambda x: put(np.asarray(x)), batch)


def bytes_per_device(
    plan: Plan, state: RegionState, devices: int, *, shard_optimizer: bool = False
) -> dict[str, int]:
    """Return how many bytes of a state each device of a data-parallel step holds.

    Of the state alone: gradients and activations come and go within a step.

    Args:
        plan: the static layout.
        state: of any step of the plan, or its shapes, as of `jax.eval_shape`.
        devices: how many there are to be.
        shard_optimizer: as for :func:`data_parallel`.

    Returns:
        Bytes by field; their sum is what a device holds.

    Raises:
        ValueError: for fewer than one device, or a state of another plan.

    Example:
        >>> import rjax
        >>> params = {"w": jnp.zeros((64, 64))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> shapes = jax.eval_shape(lambda: rjax.init_state(plan, params))
        >>> whole = bytes_per_device(plan, shapes, 4)
        >>> shard = bytes_per_device(plan, shapes, 4, shard_optimizer=True)
        >>> whole["master"], shard["master"], whole["compute"], shard["compute"]
        (16896, 4224, 8448, 8448)
    """
    if devices < 1:
        raise ValueError(f"`devices` must be at least 1, got {devices}.")
    check_state(plan, state)
    found = {}
    for field in dataclasses.fields(state):
        leaves = jax.tree.leaves(getattr(state, field.name))
        found[field.name] = sum(map(_nbytes, leaves))
        if leaves and field.name in SHARDED:
            share = arena_length(plan, devices) // devices
            found[field.name] = 4 * (share if shard_optimizer else plan.n)
    return {name: n for name, n in found.items() if n}


def _nbytes(x: Any) -> int:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return 4 * jax.eval_shape(jax.random.key_data, x).size
    return x.size * x.dtype.itemsize
