"""What a parameter is, by name and shape, by rule, or by tracing an example."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
from jax.extend import core as jex_core

from rjax.regions import Role

_NORM_SCALE_NAMES = frozenset({"scale", "gamma"})
_BIAS_NAMES = frozenset({"bias", "b", "beta", "offset"})
# Words of a module's name that mean normalisation: "bn1", "BatchNorm_0", "ln_f", ...
_NORM_MODULE = re.compile(r"norm|^(bn|ln|gn|rms)(?![a-z])|[._](bn|ln|gn)(?![a-z])")
# First-conv fallback without an example: images have at most this many channels.
_IMAGE_CHANNELS = 4

Rule = Callable[[str, Any], "Param | None"]


@dataclasses.dataclass(frozen=True)
class Param:
    """What a path rule says about one parameter; `None` means the default.

    Args:
        role: a :class:`Role` or its name, such as "deep_conv".
        precision: "half" gives the parameter a compute copy in half precision,
            "float32" keeps it float32 in the compute view.
        decay: whether weight decay applies.
        trainable: `False` freezes it: kept once, outside the arenas, never moved.

    Raises:
        ValueError: for an unknown role or precision.

    Example:
        >>> Param(role="deep_conv", decay=False).role
        <Role.DEEP_CONV: 'deep_conv'>
    """

    role: Role | str | None = None
    precision: Literal["half", "float32"] | None = None
    decay: bool | None = None
    trainable: bool | None = None

    def __post_init__(self) -> None:
        if self.role is not None:
            try:
                role = Role(str(self.role).lower())
            except ValueError:
                names = ", ".join(repr(str(role)) for role in Role)
                raise ValueError(
                    f"Param `role` must be one of {names}, got {self.role!r}."
                ) from None
            object.__setattr__(self, "role", role)
        if self.precision not in (None, "half", "float32"):
            raise ValueError(
                f"Param `precision` must be 'half' or 'float32', got "
                f"{self.precision!r}."
            )


def default_role(path: str, shape: Sequence[int], siblings: Iterable[str]) -> Role:
    """Return the role of a parameter by its name and shape.

    Args:
        path: such as "block1/conv/kernel".
        shape: of the parameter.
        siblings: names of the leaves beside it in the same module.
    """
    *modules, name = path.split("/")
    name, module = name.lower(), modules[-1].lower() if modules else ""
    siblings = {sibling.lower() for sibling in siblings}
    norm = bool(_NORM_SCALE_NAMES & siblings) or bool(_NORM_MODULE.search(module))
    if name in _BIAS_NAMES:
        return Role.BN_BIAS if norm else Role.FC_BIAS
    if name in _NORM_SCALE_NAMES:
        return Role.BN_WEIGHT
    if len(shape) <= 1:
        return Role.BN_WEIGHT if norm else Role.FC_BIAS
    if len(shape) in (4, 5) or (len(shape) == 3 and "conv" in path.lower()):
        return Role.DEEP_CONV
    return Role.FC_WEIGHT


def looks_like_first_conv(role: Role, shape: Sequence[int]) -> bool:
    """Whether a conv kernel (HWIO) reads few enough channels to read the input."""
    return (
        role is Role.DEEP_CONV and len(shape) == 4 and shape[-2] <= _IMAGE_CHANNELS
    )  # fmt: skip


def convs_reading_input(closed: Any, num_params: int, num_batch: int) -> set[int]:
    """Return the indices of parameters convolved with the input itself.

    Follows two kinds of values through a jaxpr whose first inputs are the parameter
    leaves and whose last are the batch leaves: those computed from the batch without
    meeting a parameter, and those that are one parameter, reshaped or cast.

    Args:
        closed: a ClosedJaxpr of the loss.
        num_params: number of parameter leaves.
        num_batch: number of batch leaves.
    """
    jaxpr = closed.jaxpr
    tags: list[Any] = [None] * len(jaxpr.invars)
    tags[:num_params] = range(num_params)
    tags[len(tags) - num_batch :] = ["batch"] * num_batch
    found: set[int] = set()
    _follow(jaxpr, tags, found)
    return found


def _follow(jaxpr: Any, tags: list[Any], found: set[int]) -> list[Any]:
    """Tag the variables of a jaxpr and return the tags of its outputs.

    A tag is a parameter's index, "batch", "mixed", or `None` for a constant.
    """
    known: dict[Any, Any] = dict(zip(jaxpr.invars, tags, strict=True))

    def tag(atom: Any) -> Any:
        return None if isinstance(atom, jex_core.Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
        ins = [tag(atom) for atom in eqn.invars]
        if eqn.primitive.name == "conv_general_dilated":
            left, right = ins[0], ins[1]
            if left == "batch" and isinstance(right, int):
                found.add(right)
        inner = _inner_jaxpr(eqn)
        if inner is not None:
            outs = _follow(inner, ins, found)
        else:
            outs = [_merge(ins)] * len(eqn.outvars)
        known.update(zip(eqn.outvars, outs, strict=True))
    return [tag(atom) for atom in jaxpr.outvars]


def _inner_jaxpr(eqn: Any) -> Any:
    """Return the body of a call-like equation whose inputs map one to one."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(name)
        inner = getattr(inner, "jaxpr", inner)
        if inner is not None and hasattr(inner, "invars"):
            same_in = len(inner.invars) == len(eqn.invars)
            same_out = len(inner.outvars) == len(eqn.outvars)
            return inner if same_in and same_out else None
    return None


def _merge(tags: list[Any]) -> Any:
    """Tag of a value computed from several: one kind stays, two kinds mix."""
    kinds = {tag for tag in tags if tag is not None}
    if len(kinds) > 1:
        return "mixed"
    return kinds.pop() if kinds else None


def trace_first_convs(loss_fn: Any, arguments: tuple[Any, ...]) -> set[int]:
    """Trace ``loss_fn(params, batch_stats, batch, key)`` and find the first convs.

    Args:
        loss_fn: the loss the step will be built from.
        arguments: its four arguments, arrays or ShapeDtypeStructs.
    """
    params, batch_stats, batch, key = arguments

    def reordered(params: Any, rest: Any, batch: Any) -> Any:
        batch_stats, key = rest
        return loss_fn(params, batch_stats, batch, key)

    closed = jax.make_jaxpr(reordered)(params, (batch_stats, key), batch)
    num_params, num_batch = len(jax.tree.leaves(params)), len(jax.tree.leaves(batch))
    return convs_reading_input(closed, num_params, num_batch)
