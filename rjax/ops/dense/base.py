"""The dense op in plain lax: reference, fallback and documentation."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class _DTypes(NamedTuple):
    """What the backward pass must know of arguments that it does not keep."""

    x: jnp.dtype
    bias: jnp.dtype | None


def dense(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    tap: jax.Array | None = None,
) -> jax.Array:
    """Return `[*batch, outputs]` in the kernel's dtype; see the API page.

    `tap` (float32, the shape of `kernel`) never enters the value; where given, it
    receives the float32 weight gradient in place of `kernel`.
    """
    dtypes = _DTypes(x.dtype, None if bias is None else bias.dtype)
    if tap is None:
        return _plain(dtypes, x, kernel, bias)
    return _tapped(dtypes, x, kernel, tap, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _plain(
    dtypes: _DTypes, x: jax.Array, kernel: jax.Array, bias: jax.Array | None
) -> jax.Array:
    del dtypes
    return _product(x, kernel, bias)


def _plain_forward(
    dtypes: _DTypes, x: jax.Array, kernel: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    del dtypes
    return _product(x, kernel, bias), (x.astype(kernel.dtype), kernel)


def _plain_backward(
    dtypes: _DTypes, residuals: tuple[jax.Array, jax.Array], ct: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    dx, dw, db = _gradients(dtypes, *residuals, ct)
    return dx, dw.astype(ct.dtype), db


_plain.defvjp(_plain_forward, _plain_backward)


# A custom_vjp must return each cotangent in the dtype of its argument, so a half
# kernel cannot receive a float32 gradient. The tap is a float32 argument that can.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tapped(
    dtypes: _DTypes,
    x: jax.Array,
    kernel: jax.Array,
    tap: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    del dtypes, tap
    return _product(x, kernel, bias)


def _tapped_forward(
    dtypes: _DTypes,
    x: jax.Array,
    kernel: jax.Array,
    tap: jax.Array,
    bias: jax.Array | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    del tap
    return _plain_forward(dtypes, x, kernel, bias)


def _tapped_backward(
    dtypes: _DTypes, residuals: tuple[jax.Array, jax.Array], ct: jax.Array
) -> tuple[jax.Array, None, jax.Array, jax.Array | None]:
    dx, dw, db = _gradients(dtypes, *residuals, ct)
    return dx, None, dw, db


_tapped.defvjp(_tapped_forward, _tapped_backward)


def _product(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    out = _dot(x.astype(kernel.dtype), kernel, [x.ndim - 1], [0])
    if bias is not None:
        out = out + jnp.broadcast_to(bias.astype(out.dtype), out.shape)
    return out.astype(kernel.dtype)


def _gradients(
    dtypes: _DTypes, x: jax.Array, kernel: jax.Array, ct: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return dx, the unrounded dW, and db."""
    leading = list(range(x.ndim - 1))
    dx = _dot(ct, kernel, [ct.ndim - 1], [1]).astype(dtypes.x)
    dw = _dot(x, ct, leading, leading)
    if dtypes.bias is None:
        return dx, dw, None
    db = jnp.sum(ct.astype(dw.dtype), axis=tuple(leading))
    return dx, dw, db.astype(dtypes.bias)


def _dot(a: jax.Array, b: jax.Array, over_a: list[int], over_b: list[int]) -> jax.Array:
    """Contract two arrays of one dtype, accumulating in at least float32."""
    accumulator = jnp.float64 if a.dtype == jnp.float64 else jnp.float32
    return lax.dot_general(
        a, b, ((over_a, over_b), ((), ())), preferred_element_type=accumulator
    )
