"""Public face of the dense op."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rjax.ops.dense import base
from rjax.ops.dense.taps import find_tap
from rjax.ops.dispatch import resolve
from rjax.ops.manual_axes import align

_IMPLEMENTATIONS = {"xla": base.dense}


def dense(
    x: Float[Array, "*batch inputs"],
    kernel: Float[Array, "inputs outputs"],
    bias: Float[Array, " outputs"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "*batch outputs"]:
    """Return `x @ kernel + bias` in the dtype of the kernel.

    Equals `(f32(half(x)) @ f32(kernel) + f32(bias)).astype(kernel.dtype)`, where `half`
    rounds x to the dtype of the kernel: products accumulate in float32, the bias is
    added in float32, the sum is rounded once. A float32 bias beside a half-precision
    kernel is the normal case.

    The backward pass accumulates in float32 too and rounds each gradient once, to the
    dtype of its argument. With a half-precision kernel that rounding of the weight
    gradient goes away inside `float32_weight_gradients`, for a kernel registered there.
    Leave the batch in leading axes: under `vmap` each mapped row gets its own rounded
    weight gradient before they are summed.

    Args:
      x: any floating dtype, `[*batch, inputs]`.
      kernel: any floating dtype, `[inputs, outputs]`; sets the compute dtype.
      bias: any floating dtype, `[outputs]`, or `None`.
      implementation: `"xla"`, or `None` to let rjax choose.

    Returns:
      `[*batch, outputs]` in the dtype of `kernel`.

    Raises:
      ValueError: a dtype or a shape is wrong.

    Example:
      >>> x = jnp.array([[1.0, 2.0]])
      >>> dense(x, jnp.ones((2, 3), jnp.bfloat16), jnp.zeros(3))
      Array([[3, 3, 3]], dtype=bfloat16)
    """
    run = resolve("dense", implementation, _IMPLEMENTATIONS)
    tap = find_tap(kernel)  # by identity, so before anything touches the kernel
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    bias = None if bias is None else jnp.asarray(bias)
    _validate(x, kernel, bias)
    optional = [a for a in (tap, bias) if a is not None]
    x, kernel, *optional = align(x, kernel, *optional)
    bias = None if bias is None else optional.pop()
    tap = None if tap is None else optional.pop()
    return run(x, kernel, bias, tap)


def _validate(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> None:
    arrays = {"x": x, "kernel": kernel} | ({} if bias is None else {"bias": bias})
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"`{name}` must be floating, got {array.dtype}; convert it with "
                "`.astype(jnp.float32)`."
            )
    if kernel.ndim != 2:
        raise ValueError(
            f"`kernel` must be [inputs, outputs], got shape {kernel.shape}; reshape it "
            "to two axes."
        )
    if x.ndim == 0 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"`x` must end in the {kernel.shape[0]} inputs of `kernel`, got shape "
            f"{x.shape} with `kernel` {kernel.shape}; flatten or transpose `x`."
        )
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(
            f"`bias` must have one value per output, expected {kernel.shape[1:]}, got "
            f"{bias.shape}; reshape it or leave it at None."
        )
