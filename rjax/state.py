"""The training state: a flat pytree of region arrays, and views of it."""

import dataclasses
import functools
import math
import numbers
import warnings
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from rjax import displays, drawing
from rjax.ops import cast
from rjax.ops.check_finite import nonfinite_slots
from rjax.optim import OptaxOptimizer
from rjax.plan import Plan
from rjax.trees import dtype_of, flatten, pytree


@pytree
@dataclasses.dataclass(frozen=True)
class Results:
    """Accumulated over applied steps: region `R_RESULT_ACCUMULATED`.

    Attributes:
        loss_sum: f32[], sum of the losses.
        count: i32[], number of steps summed.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> results = rjax.init_state(plan, params).results
        >>> float(results.loss_sum), int(results.count)
        (0.0, 0)
    """

    loss_sum: jax.Array
    count: jax.Array


@pytree
@dataclasses.dataclass(frozen=True)
class RegionState:
    """Everything that training carries from step to step.

    n is `plan.n`, b is `plan.bias_like`; half is the compute dtype. Every step takes
    and returns the same structure, and no two fields share a buffer, so the state
    can be donated.

    Attributes:
        master: f32[n], the weights the optimizer moves.
        compute: half[n - b], the kernels as the forward pass sees them; `None` in
            fp32.
        mu: f32[n], momentum or first moment, or `None`.
        nu: f32[n], second moment, or `None`.
        ema: f32[n], average of the masters, or `None`.
        ema_compute: half[n - b], its half-precision copy, or `None`.
        batch_stats: pytree of running statistics, `{}` if the model has none.
        ema_batch_stats: their average or copy, or `None`.
        opt_state: Optax state, or `None` with a native optimizer.
        frozen: {path: array}, frozen parameters in compute precision.
        scale: f32[], loss scale of the next step.
        scaling_state: own state of the loss-scale rule.
        learning_rate: f32[], rate of the next step; unused with a schedule.
        step: i32[], attempted steps.
        applied_steps: i32[], applied steps.
        skipped: i32[], skipped steps.
        consecutive_skips: i32[], skipped steps since the last applied one.
        results: see :class:`Results`.
        key: random key, constant; a step folds its number into it.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> state = rjax.init_state(plan, params)
        >>> state.master.shape, state.compute.dtype.name, float(state.scale)
        ((128,), 'float16', 8192.0)
    """

    master: jax.Array
    compute: jax.Array | None
    mu: jax.Array | None
    nu: jax.Array | None
    ema: jax.Array | None
    ema_compute: jax.Array | None
    batch_stats: Any
    ema_batch_stats: Any
    opt_state: Any
    frozen: dict[str, jax.Array]
    scale: jax.Array
    scaling_state: Any
    learning_rate: jax.Array
    step: jax.Array
    applied_steps: jax.Array
    skipped: jax.Array
    consecutive_skips: jax.Array
    results: Results
    key: jax.Array

    def _rows(self) -> list[tuple[str, str]]:
        fields = dataclasses.fields(self)
        found = [(f.name, displays.value(getattr(self, f.name))) for f in fields]
        return [(name, words) for name, words in found if words != "none"]

    def __repr__(self) -> str:
        return displays.text("RegionState", self._rows())

    def _repr_html_(self) -> str:
        told = dict(self._rows())
        counted = f"step {told['step']}, applied {told['applied_steps']}"
        counted += f", skipped {told['skipped']}, scale {told['scale']}"
        size = drawing.readable(displays.nbytes(self))
        return displays.page("state", f"{counted}, {size}", self._rows())

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields replaced; nothing recompiles.

        Numbers given for scalar fields become arrays of the field's dtype.

        Args:
            **changes: new values by field name.

        Raises:
            ValueError: for an unknown field, or a scale or learning rate that no
                step could use.

        Example:
            ``state = state.replace(learning_rate=0.01)``
        """
        for name, value in changes.items():
            if name not in self.__dataclass_fields__:
                raise ValueError(f"RegionState has no field {name!r}.")
            old = getattr(self, name)
            number = isinstance(value, numbers.Real)
            if number or (name in _SCALARS and value.dtype != old.dtype):
                changes[name] = _scalar_array(name, value, old)
        return dataclasses.replace(self, **changes)


_SCALARS = (
    "scale", "learning_rate", "step", "applied_steps", "skipped", "consecutive_skips"
)  # fmt: skip

# What only an applied step moves; a skipped one keeps its bits.
GATED = (
    "master", "compute", "mu", "nu", "ema", "ema_compute", "batch_stats",
    "ema_batch_stats", "opt_state", "applied_steps", "results",
)  # fmt: skip


def init_state(
    plan: Plan, params: Any, batch_stats: Any = None, seed: int | jax.Array = 0
) -> RegionState:
    """Fill the arenas from initial parameters.

    Works under `jit` and `vmap` (over seeds or parameters); the checks of values are
    then left out.

    Args:
        plan: from :func:`rjax.make_plan`.
        params: parameter tree of the plan's structure, floating.
        batch_stats: initial running statistics, if the plan has any.
        seed: integer seed or a key from `jax.random.key`.

    Returns:
        A state that owns all its buffers: `params` stays yours.

    Raises:
        ValueError: by path, for a wrong structure, shape or dtype, and for values
            that are not finite.

    Example:
        >>> import rjax
        >>> params = {"dense": {"kernel": jnp.ones((3, 2))}}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> state = rjax.init_state(plan, params)
        >>> state.master.shape, state.compute.dtype.name, float(state.scale)
        ((128,), 'float16', 8192.0)
    """
    leaves = complete(plan, params)
    stats = _checked_stats(plan, batch_stats)
    state = _initial(plan, leaves, stats, _as_key(seed))
    check_values(plan, state, "params")
    return state


@functools.partial(jax.jit, static_argnums=0)
def _initial(
    plan: Plan, leaves: list[Any], batch_stats: Any, key: jax.Array
) -> RegionState:
    gates, config = plan.gates, plan.config
    master, compute, frozen = stored(plan, leaves)
    zeros = functools.partial(jnp.zeros_like, master)
    scale, scaling_state = config.scale_rule.init()
    count = functools.partial(jnp.zeros, (), jnp.int32)
    rate = config.learning_rate if config.schedule is None else None
    opt_state = None
    if isinstance(config.optimizer, OptaxOptimizer):
        opt_state = config.optimizer.init(plan.unpack(master))
    return RegionState(
        master=master,
        compute=compute,
        mu=zeros() if gates.mu else None,
        nu=zeros() if gates.nu else None,
        ema=jnp.copy(master) if gates.ema else None,
        ema_compute=copied(compute) if gates.ema else None,
        batch_stats=copied(batch_stats),
        ema_batch_stats=copied(batch_stats) if gates.ema else None,
        opt_state=copied(opt_state),
        frozen=frozen,
        scale=scale,
        scaling_state=scaling_state,
        learning_rate=jnp.asarray(0.0 if rate is None else rate, jnp.float32),
        step=count(),
        applied_steps=count(),
        skipped=count(),
        consecutive_skips=count(),
        results=Results(jnp.zeros((), jnp.float32), count()),
        key=jnp.copy(key),
    )


def half_copy(plan: Plan, arena: jax.Array) -> jax.Array | None:
    """Cast a full-length float32 arena to its half-precision copy, if there is one."""
    if plan.half_dtype is None:
        return None
    return cast(arena[plan.bias_like :], plan.half_dtype)


def views(
    plan: Plan, master: jax.Array, compute: jax.Array | None
) -> list[jax.Array]:  # fmt: skip
    """Return one array per slot, in slot order, as the loss function sees them."""
    found = []
    for slot in plan.slots:
        arena, start = master, slot.offset
        if slot.half and compute is not None:
            arena, start = compute, slot.offset - plan.bias_like
        flat = jax.lax.slice(arena, (start,), (start + slot.size,))
        found.append(flat.reshape(slot.shape))
    return found


def assemble(
    plan: Plan, values: Sequence[Any], frozen: dict[str, jax.Array]
) -> Any:  # fmt: skip
    """Return the parameter tree made of one value per slot and the frozen ones."""
    leaves: list[Any] = [None] * plan.treedef.num_leaves
    for slot, value in zip(plan.slots, values, strict=True):
        leaves[slot.leaf] = value
    for leaf in plan.frozen:
        leaves[leaf.leaf] = frozen[leaf.path]
    return jax.tree.unflatten(plan.treedef, leaves)


def stored(plan: Plan, leaves: list[Any]) -> tuple[Any, Any, dict[str, jax.Array]]:
    """Return master arena, compute arena and frozen parameters."""
    master = plan.concatenate([leaves[s.leaf] for s in plan.slots], jnp.float32)
    frozen = {
        leaf.path: jnp.array(leaves[leaf.leaf]).astype(leaf.dtype)
        for leaf in plan.frozen
    }
    return master, half_copy(plan, master), frozen


def _narrow(leaf: Any) -> Any:
    """Round a float64 NumPy leaf to float32 on the host; beyond its range is inf.

    `jit` rounds it with a RuntimeWarning, which, if warnings are errors, crashes jax
    (seen with 0.10.2).
    """
    if isinstance(leaf, jax.Array) or dtype_of(leaf) != np.float64:
        return leaf
    with np.errstate(over="ignore"):
        return np.asarray(leaf, np.float32)


def copied(tree: Any) -> Any:
    """Return the tree in buffers of its own."""
    return jax.tree.map(jnp.copy, tree)


def _as_key(seed: Any) -> jax.Array:
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return seed
    return jax.random.key(seed)


def complete(plan: Plan, params: Any) -> list[Any]:
    """Return the leaves of a parameter tree, the frozen ones among them."""
    leaves = plan.check_tree(params, "params")
    for leaf in plan.frozen:
        if leaves[leaf.leaf] is None:
            raise ValueError(
                f"`params` lacks the frozen parameter {leaf.path!r}; pass all of them."
            )
    return [_narrow(leaf) for leaf in leaves]


def _checked_stats(plan: Plan, batch_stats: Any) -> Any:
    """Return the statistics as arrays, or say how they differ from the plan's."""
    batch_stats = {} if batch_stats is None else batch_stats
    found = {path: np.shape(leaf) for path, leaf in flatten(batch_stats)[0]}
    for leaf in plan.batch_stats:
        if found.get(leaf.path) != leaf.shape:
            raise ValueError(
                f"`batch_stats` must hold {leaf.path!r} of shape {list(leaf.shape)} "
                "as the plan says; pass the statistics the plan was made with."
            )
    # A plan made without statistics counts none; a state may hold them all the same.
    known = {leaf.path for leaf in plan.batch_stats}
    extra = [path for path in found if path not in known]
    if known and extra:
        raise ValueError(
            f"`batch_stats` has {extra[0]!r} too much; make the plan with the same "
            "statistics."
        )
    return batch_stats


def check_values(plan: Plan, state: RegionState, name: str) -> None:
    """Raise on non-finite weights, warn on those outside the half range."""
    if isinstance(state.master, Tracer):
        return
    bad = np.asarray(_nonfinite_slots(plan, state.master))
    if bad.any():
        path = plan.slots[int(bad.argmax())].path
        raise ValueError(
            f"`{name}` leaf {path!r} has values that are not finite in float32; "
            "initialise or load it again."
        )
    for path, leaf in state.frozen.items():
        if not np.isfinite(np.asarray(leaf, np.float32)).all():
            raise ValueError(
                f"`{name}` leaf {path!r} has values that are not finite in "
                f"{leaf.dtype}; rescale it or keep it in float32 by the path rule."
            )
    paths = outside_half_range(plan, state)
    if paths:
        warnings.warn(
            f"`{name}` leaf {paths[0]!r} has values beyond the range of "
            f"{plan.config.precision}: they are infinite in the compute copy; rescale "
            "them or give it precision='float32' by the path rule.",
            UserWarning,
            stacklevel=3,
        )


# One program each: operation by operation they took most of the time of init_state.
@functools.partial(jax.jit, static_argnums=0)
def _nonfinite_slots(plan: Plan, arena: jax.Array) -> jax.Array:
    return nonfinite_slots(arena, plan.slot_table)


@jax.jit
def _all_finite(arena: jax.Array) -> jax.Array:
    return jnp.isfinite(arena).all()


def outside_half_range(plan: Plan, state: RegionState) -> list[str]:
    """Return the paths of parameters whose compute copy is not finite (host)."""
    if state.compute is None or _all_finite(state.compute):
        return []
    copy = np.asarray(state.compute).astype(np.float32)
    bad = ~np.isfinite(copy)
    if not bad.any():
        return []
    b = plan.bias_like
    half = (s for s in plan.slots if s.half)
    return [s.path for s in half if bad[s.offset - b : s.offset - b + s.size].any()]


def _scalar_array(name: str, value: Any, old: Any) -> jax.Array:
    """Return a number as an array like `old`, unless no step could use it."""
    number = float(value)
    if name not in _SCALARS:
        raise ValueError(f"`{name}` must be an array like the old one, got {value}.")
    if name == "scale" and not (math.isfinite(number) and number > 0):
        raise ValueError(f"`scale` must be a finite number > 0, got {value}.")
    if not math.isfinite(number):
        raise ValueError(f"`{name}` must be finite, got {value}.")
    return jnp.full(old.shape, number, old.dtype)
