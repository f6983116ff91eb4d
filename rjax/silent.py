"""Products that a model computes in float32 although it was given half kernels.

Stock layers promote: a float32 bias or input beside a half kernel makes the product a
float32 one, silently and slowly. The front doors look for such products in the jaxpr of
the model and say which parameters they read.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from rjax.trees import dtype_of, flatten

_PRODUCTS = ("dot_general", "conv_general_dilated")
_NAMED = 3
# What a value is made of: data if of any, else the half-precision parameter of the
# highest index, which is its tag, else float32 parameters, else constants.
_FLOAT32, _DATA, _CONSTANT = -1, -2, -3


class Float32Watch:
    """Warns once about each kind of call; what it has seen is all that it keeps.

    Args:
        door: name of the front door, for the message.
        remedy: the end of the sentence.
    """

    def __init__(self, door: str, remedy: str) -> None:
        self._door, self._remedy = door, remedy
        self._seen: set[Any] = set()

    def look(self, forward: Callable[..., Any], params: Any, *rest: Any) -> None:
        """Trace ``forward(params, *rest)`` and warn about float32 products.

        Without half-precision parameters, or for shapes seen before, it does nothing.
        """
        found = flatten(params)[0]
        half = [dtype_of(leaf).itemsize < 4 for _, leaf in found]
        kinds = tuple((path, str(dtype_of(leaf))) for path, leaf in found)
        shapes = tuple(np.shape(leaf) for leaf in jax.tree.leaves(rest))
        if not any(half) or (kinds, shapes) in self._seen:
            return
        self._seen.add((kinds, shapes))
        closed = jax.make_jaxpr(forward)(params, *rest)
        tags = [i if half[i] else _FLOAT32 for i in range(len(found))]
        tags += [_DATA] * (len(closed.jaxpr.invars) - len(tags))
        read = set(_wide_products(closed.jaxpr, tags, {}))
        paths = [found[i][0] for i in sorted(read)]
        if paths:
            self._warn(paths, found[min(read)][1])

    def _warn(self, paths: list[str], first: Any) -> None:
        named = ", ".join(map(repr, paths[:_NAMED]))
        more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
        warnings.warn(
            f"{self._door}: products with {named}{more} run in float32 although the "
            f"parameters are {dtype_of(first)}: a float32 bias or input promotes them; "
            f"{self._remedy}",
            UserWarning,
            stacklevel=4,
        )


def _wide_products(
    jaxpr: Any, tags: Sequence[int], outs: dict[int, int]
) -> Iterator[int]:
    """Yield the half-precision parameters read by products in float32 or wider.

    Follows values that are computed from parameters alone: cast, reshaped, normalised.

    Args:
        jaxpr: of the model, or a part of it.
        tags: of its inputs.
        outs: filled with the tags of its outputs, by position.
    """
    known: dict[Any, int] = dict(zip(jaxpr.invars, tags, strict=True))

    def tag(atom: Any) -> int:
        literal = isinstance(atom, jex_core.Literal)
        return _CONSTANT if literal else known.get(atom, _CONSTANT)

    for eqn in jaxpr.eqns:
        ins = [tag(atom) for atom in eqn.invars]
        if eqn.primitive.name in _PRODUCTS:
            for index, atom in zip(ins, eqn.invars, strict=True):
                if index >= 0 and _is_wide(atom.aval.dtype):
                    yield index
        merged = _DATA if _DATA in ins else max(ins, default=_CONSTANT)
        after = dict.fromkeys(range(len(eqn.outvars)), merged)
        for body in _inner_jaxprs(eqn):
            yield from _wide_products(body, ins[len(ins) - len(body.invars) :], after)
        known.update((var, after[i]) for i, var in enumerate(eqn.outvars))
    outs.update((i, tag(atom)) for i, atom in enumerate(jaxpr.outvars))


def _is_wide(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4


def _inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yield the bodies of an equation whose last inputs are the body's inputs."""
    for value in eqn.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            body = getattr(body, "jaxpr", body)
            fits = hasattr(body, "eqns") and len(body.invars) <= len(eqn.invars)
            if fits and len(body.outvars) == len(eqn.outvars):
                yield body
