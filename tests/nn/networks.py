"""What tests of whole networks share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KEY = jax.random.key(0)


def shapes_of(model: Any, *image: int) -> Any:
    """Return the shapes of a model's variables for images of a shape."""
    return jax.eval_shape(model.init, KEY, jax.ShapeDtypeStruct(image, jnp.float32))


def drawn(model: Any, *image: int) -> Any:
    """Draw variables on the host, statistics and norm parameters away from 0 and 1."""
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        name = path[-1].key
        if name == "kernel":
            fan_in = np.prod(leaf.shape[:-1])
            values = rng.normal(size=leaf.shape) * np.sqrt(2 / fan_in)
        elif name in ("scale", "var"):
            values = rng.uniform(0.5, 1.5, leaf.shape)
        else:
            values = 0.3 * rng.normal(size=leaf.shape)
        return jnp.asarray(values, jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes_of(model, *image))


def halved(params: Any, dtype: Any) -> Any:
    """Return parameters with kernels in half precision."""
    return jax.tree.map(lambda p: p.astype(dtype) if p.ndim > 1 else p, params)


def products_of(jaxpr: Any) -> Any:
    """Yield the dtypes of what convolutions and dots multiply, in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("conv_general_dilated", "dot_general"):
            yield {v.aval.dtype for v in equation.invars}
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from products_of(inner)
