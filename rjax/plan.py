"""The plan: where every parameter lies, decided before the first step."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rjax import table
from rjax.config import Config
from rjax.layout import Leaf, Slot, lay_out
from rjax.ops.slots import ROW, SlotTable
from rjax.regions import REGIONS, ROLES, Gates, Region, Role
from rjax.roles import Rule
from rjax.trees import check_distinct, check_floating, dtype_of, flatten


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The static layout of a training state. Made by :func:`make_plan`.

    Frozen, hashable, equal by value (functions in the config by identity).

    Attributes:
        config: the pipeline this plan is for.
        slots: the trainable parameters in arena order.
        frozen: the frozen parameters, which lie outside the arenas.
        batch_stats: the running statistics, which stay an ordinary pytree.
        treedef: structure of the parameter tree.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> plan
        Plan(8 parameters in 1 slots, ...)
        >>> plan.bounds(rjax.Region.W_FC_WEIGHT)
        (0, 128)
    """

    config: Config
    slots: tuple[Slot, ...]
    frozen: tuple[Leaf, ...]
    batch_stats: tuple[Leaf, ...]
    treedef: Any

    def __repr__(self) -> str:
        return f"Plan({table.summary(self)})"

    @functools.cached_property
    def n(self) -> int:
        """Elements of a full-length arena, padding included."""
        return sum(slot.capacity for slot in self.slots)

    @functools.cached_property
    def bias_like(self) -> int:
        """Elements of the prefix that has no half-precision copy."""
        return sum(slot.capacity for slot in self.slots if not slot.half)

    @functools.cached_property
    def half_dtype(self) -> Any:
        """Dtype of the compute copy, `None` in fp32."""
        policy = self.config.policy
        return policy.compute_dtype if policy.half else None

    @functools.cached_property
    def gates(self) -> Gates:
        """Which optional series exist."""
        optimizer = self.config.optimizer
        return Gates(
            half=self.config.policy.half,
            ema=self.config.ema is not None,
            mu=optimizer.has_mu,
            nu=optimizer.has_nu,
            ratios=optimizer.has_ratios,
            norms=any(s.part in (Role.BN_BIAS, Role.BN_WEIGHT) for s in self.slots),
            statistics=bool(self.batch_stats),
        )

    @functools.cached_property
    def slot_table(self) -> SlotTable:
        """The per-slot constants that range operations read."""
        return SlotTable(
            rows=tuple(slot.capacity // ROW for slot in self.slots),
            decay=tuple(slot.decay for slot in self.slots),
            adaptive=tuple(not slot.role.bias_like for slot in self.slots),
        )

    def bounds(self, first: Region, last: Region | None = None) -> tuple[int, int]:
        """Return (start, stop), in elements within the arena of the regions' series.

        Args:
            first: first region of the range.
            last: last region of the range, in the same series; `first` by default.

        Returns:
            The half-open range; an empty one for a region that is gated off.

        Raises:
            ValueError: if the regions are of two series or in the wrong order.
        """
        last = first if last is None else last
        low, high = REGIONS[Region(first)], REGIONS[Region(last)]
        arena = low.series == high.series and (low.role is not None or first == last)
        if not arena or first > last:
            raise ValueError(
                f"`bounds` needs two regions of one arena in order, got "
                f"{low.region.name} and {high.region.name}."
            )
        ranges = [
            self._bounds_of(region)
            for region in Region
            if first <= region <= last and REGIONS[region].series == low.series
        ]
        ranges = [(start, stop) for start, stop in ranges if start < stop]
        return (ranges[0][0], ranges[-1][1]) if ranges else (0, 0)

    def _bounds_of(self, region: Region) -> tuple[int, int]:
        info = REGIONS[region]
        if not info.enabled(self.gates):
            return 0, 0
        if info.role is None:
            return 0, table.loose_elements(self, region) or 0
        before = ROLES[: ROLES.index(info.role)]
        if info.series == "N":
            count = [slot.part for slot in self.slots if slot.half].count
            start = sum(count(role) for role in before)
            return start, start + count(info.role)
        start = sum(slot.capacity for slot in self.slots if slot.part in before)
        length = sum(slot.capacity for slot in self.slots if slot.part == info.role)
        start -= self.bias_like if info.series in ("A", "E_FP16", "G_FP16") else 0
        return start, start + length

    def pack(self, tree: Any, dtype: Any = None) -> jax.Array:
        """Lay a parameter tree out as a full-length arena.

        Args:
            tree: a tree of the plan's structure; frozen leaves are ignored and may
                be `None`.
            dtype: floating dtype of the arena, float32 by default.

        Returns:
            [n] array with zero padding.

        Raises:
            ValueError: if structure, shape or dtype of a leaf is wrong, by path.
        """
        leaves = self.check_tree(tree, "tree")
        dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
        return self.concatenate([leaves[slot.leaf] for slot in self.slots], dtype)

    def concatenate(self, values: Sequence[Any], dtype: Any) -> jax.Array:
        """Lay one array per slot, in slot order, end to end: one concatenation."""
        pieces: list[jax.Array] = []
        for slot, value in zip(self.slots, values, strict=True):
            pieces.append(jnp.asarray(value).astype(dtype).reshape(-1))
            pieces.append(jnp.zeros((slot.capacity - slot.size,), dtype))
        return jnp.concatenate(pieces)

    def unpack(self, arena: jax.Array) -> Any:
        """Return the parameter tree of a full-length arena, in the arena's dtype.

        Args:
            arena: [n] array.

        Returns:
            A tree of the plan's structure, `None` in place of frozen parameters.

        Raises:
            ValueError: if the length is wrong.
        """
        if arena.shape != (self.n,):
            raise ValueError(
                f"`arena` must have shape [{self.n}], got {list(arena.shape)}."
            )
        leaves: list[Any] = [None] * self.treedef.num_leaves
        for slot in self.slots:
            flat = jax.lax.slice(arena, (slot.offset,), (slot.offset + slot.size,))
            leaves[slot.leaf] = flat.reshape(slot.shape)
        return jax.tree.unflatten(self.treedef, leaves)

    def check_tree(self, tree: Any, name: str) -> list[Any]:
        """Return the leaves of a parameter tree, or say by path what is wrong."""
        found, _ = flatten(tree, keep_none=True)
        expected = {s.leaf: s for s in (*self.slots, *self.frozen)}
        paths = [expected[i].path for i in range(len(expected))]
        given = dict(found)
        frozen = {leaf.path for leaf in self.frozen}
        given = {p: x for p, x in given.items() if x is not None or p in frozen}
        missing = [p for p in paths if p not in given and p not in frozen]
        extra = [p for p in given if p not in set(paths)]
        if missing or extra:
            wrong = f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r} too much"
            raise ValueError(
                f"`{name}` must have the structure the plan was made for, but {wrong}; "
                "make a plan for this tree."
            )
        values = [given.get(path) for path in paths]
        for slot in expected.values():
            leaf = values[slot.leaf]
            if leaf is None:
                continue
            check_floating(slot.path, leaf)
            if np.shape(leaf) != slot.shape:
                raise ValueError(
                    f"`{name}` leaf {slot.path!r} must have shape "
                    f"{list(slot.shape)}, got {list(np.shape(leaf))}."
                )
        return values

    def regions(self) -> tuple[table.Row, ...]:
        """Return a row for every enabled region: owner, dtype, offset, size."""
        return table.rows(self)

    def table(self) -> str:
        """Return the enabled regions as text: owner, dtype, offset, elements, bytes."""
        return table.text(self)

    def _repr_html_(self) -> str:
        return table.html(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all enabled regions whose size the plan knows."""
        return sum(row.nbytes or 0 for row in self.regions())

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of layout and gates, the same in every process."""
        layout = [
            (s.path, s.shape, str(s.role), s.offset, s.capacity, s.half)
            for s in self.slots
        ]
        loose = [
            (leaf.path, leaf.shape, leaf.dtype)
            for leaf in (*self.frozen, *self.batch_stats)
        ]
        gates = sorted(dataclasses.asdict(self.gates).items())
        text = repr((layout, loose, self.config.precision, gates))
        return hashlib.sha256(text.encode()).hexdigest()


def make_plan(
    params: Any,
    config: Config,
    batch_stats: Any = None,
    rule: Rule | None = None,
    example: tuple[Any, Any] | None = None,
) -> Plan:
    """Decide where every parameter lies.

    Args:
        params: pytree of floating arrays, or of anything with shape and dtype; no
            value is read.
        config: the pipeline.
        batch_stats: pytree of running statistics, if the model has any.
        rule: ``(path, leaf) -> Param | None``, overrides the defaults by path.
        example: ``(loss_fn, batch)``; tracing it finds the convolution that reads
            the input. Without it, that is any 4-D kernel with <= 4 input channels.
            Numbers never depend on it.

    Returns:
        The :class:`Plan`.

    Raises:
        ValueError: for an empty tree, a leaf that is not floating (by path), two
            leaves of one path, an arena of more than 2^31 - 1 elements, or a learning
            rate that is not finite at step 0.

    Example:
        >>> plan = make_plan({"dense": {"kernel": jnp.ones((3, 2))}}, Config())
        >>> plan.slots[0].path, plan.slots[0].capacity
        ('dense/kernel', 128)

    Source: `MemoryPlan` and `compute_slot_bytes` of the article, section 3.
    """
    if not isinstance(config, Config):
        raise ValueError(f"`config` must be an rjax.Config, got {config!r}.")
    found, treedef = flatten(params)
    if not found:
        raise ValueError("`params` has no leaves; pass the parameter tree of a model.")
    check_distinct("params", found)
    for path, leaf in found:
        check_floating(path, leaf)
    _check_first_rate(config)
    batch_stats = {} if batch_stats is None else batch_stats
    traced = None if example is None else (example[0], batch_stats, example[1])
    slots, frozen = lay_out(found, treedef, config, rule, traced)
    found_stats, _ = flatten(batch_stats)
    check_distinct("batch_stats", found_stats)
    stats = tuple(
        Leaf(path, tuple(np.shape(x)), str(dtype_of(x)), i)
        for i, (path, x) in enumerate(found_stats)
    )
    return Plan(config, slots, frozen, stats, treedef)


def _check_first_rate(config: Config) -> None:
    """Raise a `ValueError` if a schedule starts at a rate that is not finite."""
    if config.schedule is None:
        return
    rate = np.asarray(config.schedule(jnp.zeros((), jnp.int32)))
    if rate.shape != () or not np.isfinite(rate):
        raise ValueError(
            f"`learning_rate` schedule must give a finite number at step 0, got {rate}."
        )
