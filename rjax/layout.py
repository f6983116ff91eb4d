"""From parameters to slots: the law of where everything lies.

Six roles in the order of :class:`rjax.regions.Role`, natural path order within a
role, and for n elements ``align256(2 n + 16)`` bytes in half precision and exactly
twice that in float32: an element has the same index in every arena.

Source: `DTensor::compute_slot_bytes` of the article, section 3.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rjax.config import Config
from rjax.regions import ROLES, Role
from rjax.roles import (
    Param,
    Rule,
    default_role,
    looks_like_first_conv,
    trace_first_convs,
)

_MAX_ELEMENTS = 2**31 - 1

Found = list[tuple[str, Any]]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf that lies outside the arenas: a frozen parameter, a running statistic.

    Attributes:
        path: such as "bn1/mean".
        shape: its shape.
        dtype: name of the dtype it is kept in.
        leaf: index in the flattened tree it belongs to.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> stats = {"bn": {"mean": jnp.zeros(2)}}
        >>> plan = rjax.make_plan(params, rjax.Config(), stats)
        >>> plan.batch_stats
        (Leaf(path='bn/mean', shape=(2,), dtype='float32', leaf=0),)
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    leaf: int


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of one parameter in every arena.

    Attributes:
        path: such as "block1/conv/kernel".
        shape: of the parameter.
        role: what it is.
        offset: first element, in a full-length arena.
        size: number of elements; the rest up to `capacity` is padding, always zero.
        capacity: number of elements reserved, a multiple of 128.
        half: whether it has a half-precision compute copy (if the plan has any).
        decay: whether weight decay applies.
        leaf: index in the flattened parameter tree.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> (slot,) = plan.slots
        >>> slot.path, slot.role.name, slot.size, slot.capacity
        ('w', 'FC_WEIGHT', 8, 128)
    """

    path: str
    shape: tuple[int, ...]
    role: Role
    offset: int
    size: int
    capacity: int
    half: bool
    decay: bool
    leaf: int

    @property
    def part(self) -> Role:
        """The role whose regions it lies in: precision may move it (see `half`)."""
        return _part(self.role, self.half)


def lay_out(
    found: Found, treedef: Any, config: Config, rule: Rule | None, example: Any
) -> tuple[tuple[Slot, ...], tuple[Leaf, ...]]:
    """Give every trainable leaf a slot and set the frozen ones aside.

    Args:
        found: (path, leaf) of every parameter, in tree order.
        treedef: structure of the parameter tree.
        config: the pipeline; its precision is that of frozen parameters.
        rule: see :func:`rjax.make_plan`.
        example: ``(loss_fn, batch_stats, batch)``, or `None`.

    Raises:
        ValueError: if nothing is trainable or an arena has over 2^31 - 1 elements.
    """
    said = [_param(rule, path, leaf) for path, leaf in found]
    drafts = _drafts(found, said)
    frozen = {i for i, param in enumerate(said) if param.trainable is False}
    if example is None:
        first = {
            i for i, slot in enumerate(drafts)
            if looks_like_first_conv(slot.role, slot.shape)
        }  # fmt: skip
    else:
        first = _trace(drafts, treedef, config, *example)
    for i in first:
        if said[i].role is None:
            drafts[i] = dataclasses.replace(drafts[i], role=Role.FIRST_CONV)
    slots = _in_arena_order([s for i, s in enumerate(drafts) if i not in frozen])
    return slots, tuple(_frozen_leaf(drafts[i], config) for i in sorted(frozen))


def capacity_of(size: int) -> int:
    """Return the elements reserved for a slot of `size`: align256(2 size + 16) / 2."""
    return -(-(2 * size + 16) // 256) * 128


def _part(role: Role, half: bool) -> Role:
    """Return the role whose regions hold a parameter of this precision."""
    if half != role.bias_like:
        return role
    return Role.FC_WEIGHT if half else Role.FC_BIAS


def _natural(path: str) -> list[tuple[int, int, str]]:
    """Sort key under which block2 comes before block10."""
    pieces = re.split(r"([0-9]+)", path)
    return [
        (0, int(piece), "") if i % 2 else (1, 0, piece)
        for i, piece in enumerate(pieces)
        if piece
    ]


def _param(rule: Rule | None, path: str, leaf: Any) -> Param:
    """Return what the rule says about a leaf."""
    param = rule(path, leaf) if rule is not None else None
    if param is None:
        return Param()
    if not isinstance(param, Param):
        raise ValueError(
            f"`rule` must return an rjax.Param or None, got {param!r} for {path!r}."
        )
    return param


def _drafts(found: Found, said: list[Param]) -> list[Slot]:
    """Return a slot for every leaf, in tree order, at offset 0."""
    names: dict[str, set[str]] = {}
    for path, _ in found:
        module, _, name = path.rpartition("/")
        names.setdefault(module, set()).add(name)
    drafts = []
    for i, ((path, leaf), param) in enumerate(zip(found, said, strict=True)):
        shape = tuple(np.shape(leaf))
        siblings = names[path.rpartition("/")[0]]
        role = Role(param.role or default_role(path, shape, siblings))
        usual = not role.bias_like
        half = usual if param.precision is None else param.precision == "half"
        decay = usual if param.decay is None else bool(param.decay)
        size = math.prod(shape)
        drafts.append(
            Slot(path, shape, role, 0, size, capacity_of(size), half, decay, i)
        )
    return drafts


def _in_arena_order(slots: list[Slot]) -> tuple[Slot, ...]:
    """Sort the slots and give them their offsets."""
    if not slots:
        raise ValueError(
            "`rule` leaves no trainable parameter; set trainable=True on at least one."
        )
    slots = sorted(slots, key=lambda s: (ROLES.index(s.part), _natural(s.path)))
    total = sum(slot.capacity for slot in slots)
    if total > _MAX_ELEMENTS:
        raise ValueError(
            f"The arenas would have {total} elements, more than 2^31 - 1 on one "
            "device; freeze parameters or shard the model."
        )
    offset, placed = 0, []
    for slot in slots:
        placed.append(dataclasses.replace(slot, offset=offset))
        offset += slot.capacity
    return tuple(placed)


def _frozen_leaf(slot: Slot, config: Config) -> Leaf:
    kind = config.policy.compute_dtype if slot.half else jnp.dtype(jnp.float32)
    return Leaf(slot.path, slot.shape, kind.name, slot.leaf)


def _trace(
    drafts: list[Slot],
    treedef: Any,
    config: Config,
    loss_fn: Any,
    batch_stats: Any,
    batch: Any,
) -> set[int]:
    """Return the leaf indices of the convolutions that read the batch."""
    compute = config.policy.compute_dtype
    view = [
        jax.ShapeDtypeStruct(slot.shape, compute if slot.half else jnp.float32)
        for slot in drafts
    ]
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.tree.unflatten(treedef, view)
    return trace_first_convs(loss_fn, (params, batch_stats, batch, key))
