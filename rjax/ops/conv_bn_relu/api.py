"""Public face of convolutions with norms."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from rjax.ops.batch_axes import shared_axes
from rjax.ops.batch_norm.checks import check_residual, check_values
from rjax.ops.batch_norm.training import run_pass, values_per_channel
from rjax.ops.conv_bn_relu import training
from rjax.ops.conv_bn_relu.norm import Norm
from rjax.ops.manual_axes import align

Padding = str | Sequence[tuple[int, int]]


def conv_bn_relu(
    x: Float[Array, "batch height width inputs"],
    kernel: Float[Array, "rows columns group_inputs features"],
    norm: Norm | None = None,
    *,
    strides: int | tuple[int, int] = 1,
    padding: Padding = "SAME",
    groups: int = 1,
    axis_name: str | tuple[str, ...] | None = None,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "batch out_height out_width features"],
    Float32[Array, " features"],
    Float32[Array, " features"],
]:
    """Norm and clamp the input, convolve, and take the statistics of the result.

    Equals `a = relu((x - norm.mean) * norm.factor + norm.bias)`, computed in float32
    and rounded to the dtype of x; `z = conv(a, kernel)`, accumulated in float32 and
    rounded; mean and biased variance of z **as stored**, in float32 and safe from
    cancellation. So a network of convolutions and norms is a chain of these: each hands
    on what it stores, and the norm of it, made by :func:`norm_of`, is done by the next
    one as it reads. The last is done by :func:`normalize`.

    All three results are differentiable, and gradients through `mean` and `var` make
    the chain's backward pass that of batch norm. Kept for it are x and z, vectors and
    the kernel; a is formed again.

    Args:
        x: floating images, channel last; as the convolution before stored them.
        kernel: `[rows, columns, inputs / groups, features]`, of the dtype of x.
        norm: what is done to the input first, `None` for nothing.
        strides: along height and width, or one for both.
        padding: `"SAME"`, `"VALID"`, or a (low, high) pair for height and width; with a
            norm, what is padded is a, with zeros.
        groups: of channels, each convolved by itself.
        axis_name: mesh (or `vmap`) axes whose devices share their statistics, as in
            :func:`rjax.ops.batch_norm`.
        implementation: of the passes over images, `"xla"`, `"mosaic_gpu"` or `None` to
            let rjax choose. The convolution itself is XLA's.

    Returns:
        `(z, mean, var)`: z in the dtype of x, mean and biased variance float32
        `[features]`.

    Raises:
        ValueError: for a wrong dtype or shape, strides, padding or groups that do not
            fit, or fewer than two values a channel.
        NotImplementedError: if the implementation named cannot serve.

    Example:
        >>> x = jnp.arange(8, dtype=jnp.float16).reshape(1, 2, 2, 2)
        >>> z, mean, var = conv_bn_relu(x, jnp.ones((1, 1, 2, 1), jnp.float16))
        >>> z.ravel(), mean, var
        (Array([ 1.,  5.,  9., 13.], dtype=float16), Array([7.], dtype=float32),
         Array([20.], dtype=float32))

    Source: conv+BN+ReLU with generated statistics, section 5 of the article.
    """
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    steps, pads = _checked(x, kernel, strides, padding, groups)
    axes = shared_axes(axis_name)
    how = training.How(steps, pads, groups, axes, implementation)
    shape = jax.eval_shape(lambda x, k: training.convolve(how, x, k), x, kernel)
    check_values(values_per_channel(shape, axes), shape)
    if norm is None:
        return training.conv(how, *align(x, kernel), None)
    _check_norm(norm, x.shape[-1])
    x, kernel, *vectors = align(x, kernel, *norm)
    return training.conv(how, x, kernel, Norm(*vectors))


def normalize(
    x: Float[Array, "*batch channels"],
    norm: Norm,
    *,
    relu: bool = True,
    residual: Float[Array, "*batch channels"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*batch channels"]:
    """Do a norm that no convolution does: `(x - mean) * factor + bias`.

    Then the residual is added and a ReLU clamps, if asked for; computed in float32 and
    rounded once. Differentiable in all arrays; kept for that are x, vectors, and the
    result after a residual and a ReLU.

    Args:
        x: floating, channel last.
        norm: from :func:`norm_of`.
        relu: whether to clamp the result at zero.
        residual: of the shape and dtype of x.
        implementation: as in :func:`conv_bn_relu`.

    Returns:
        An array of the shape and dtype of x.

    Raises:
        ValueError: for a wrong dtype or shape.
        NotImplementedError: if the implementation named cannot serve.

    Example:
        >>> norm = Norm(jnp.ones(1), jnp.full(1, 2.0), jnp.zeros(1))
        >>> normalize(jnp.array([[0.0], [4.0]]), norm).ravel()
        Array([0., 6.], dtype=float32)
    """
    x = jnp.asarray(x)
    _check_floating({"x": x})
    if x.ndim < 2:
        raise ValueError(
            f"`x` must have a batch and a channel axis, got shape {x.shape}; put the "
            "channels last."
        )
    _check_norm(norm, x.shape[-1])
    check_residual(residual, "`x`", x.shape, x.dtype)
    if residual is None:
        x, *vectors = align(x, *norm)
    else:
        x, residual, *vectors = align(x, residual, *norm)
    return training.apply_norm(implementation, bool(relu), x, Norm(*vectors), residual)


def conv_bn_relu_inference(
    x: Float[Array, "batch height width inputs"],
    kernel: Float[Array, "rows columns group_inputs features"],
    eq_scale: Float[Array, " features"],
    eq_bias: Float[Array, " features"],
    *,
    strides: int | tuple[int, int] = 1,
    padding: Padding = "SAME",
    groups: int = 1,
    relu: bool = True,
    implementation: str | None = None,
) -> Float[Array, "batch out_height out_width features"]:
    """Convolve, norm by given statistics and clamp, as a trained model does.

    Equals `relu(z * eq_scale + eq_bias)` in float32, rounded once, of the z that
    :func:`conv_bn_relu` stores. Differentiable in all arrays.

    Args:
        x: floating images, channel last.
        kernel: as in :func:`conv_bn_relu`.
        eq_scale: floating `[features]`: `scale / sqrt(var + eps)`.
        eq_bias: floating `[features]`: `bias - mean * eq_scale`.
        strides: as in :func:`conv_bn_relu`.
        padding: as in :func:`conv_bn_relu`.
        groups: as in :func:`conv_bn_relu`.
        relu: whether to clamp the result at zero.
        implementation: as in :func:`conv_bn_relu`.

    Returns:
        An array of the dtype of x.

    Raises:
        ValueError: for a wrong dtype or shape, or strides, padding or groups that do
            not fit.
        NotImplementedError: if the implementation named cannot serve.

    Example:
        >>> x, one = jnp.ones((1, 2, 2, 1)), jnp.ones(1)
        >>> conv_bn_relu_inference(x, jnp.ones((1, 1, 1, 1)), 2 * one, -one).ravel()
        Array([1., 1., 1., 1.], dtype=float32)
    """
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    steps, pads = _checked(x, kernel, strides, padding, groups)
    vectors = {"eq_scale": jnp.asarray(eq_scale), "eq_bias": jnp.asarray(eq_bias)}
    _check_vectors(vectors, kernel.shape[-1])
    how = training.How(steps, pads, groups, None, implementation)
    z = training.convolve(how, x, kernel)
    eq_scale, eq_bias = (v.astype(jnp.float32) for v in vectors.values())
    norm = jnp.zeros_like(eq_bias), eq_scale, eq_bias
    options = {"relu": bool(relu), "window": None, "implementation": implementation}
    return run_pass("apply", z, *norm, None, **options)


def _checked(
    x: jax.Array, kernel: jax.Array, strides: Any, padding: Padding, groups: int
) -> tuple[tuple[int, int], str | tuple[tuple[int, int], ...]]:
    """Return strides and padding of a convolution that can be, or raise."""
    _check_floating({"x": x, "kernel": kernel})
    if x.ndim != 4 or kernel.ndim != 4:
        raise ValueError(
            "`x` must be images [batch, height, width, channels] and `kernel` [rows, "
            f"columns, inputs, features], got shapes {x.shape} and {kernel.shape}."
        )
    if x.dtype != kernel.dtype:
        raise ValueError(
            f"`kernel` must have the dtype of `x`, {x.dtype}, got {kernel.dtype}; cast "
            "one of them."
        )
    inputs, features = x.shape[-1], kernel.shape[-1]
    fits = isinstance(groups, int) and groups > 0 and features % groups == 0
    if not fits or kernel.shape[2] * groups != inputs:
        raise ValueError(
            f"`groups` times the inputs of `kernel` must be the {inputs} channels of "
            f"`x`, and divide its {features} features, got {groups} times "
            f"{kernel.shape[2]}."
        )
    steps = (strides, strides) if isinstance(strides, int) else tuple(strides)
    if len(steps) != 2 or not all(isinstance(s, int) and s > 0 for s in steps):
        raise ValueError(
            f"`strides` must be a whole number above 0 or two of them, got {strides!r}."
        )
    if isinstance(padding, str):
        if padding.upper() not in ("SAME", "VALID"):
            raise ValueError(
                f"`padding` must be 'SAME', 'VALID' or pairs, got {padding!r}."
            )
        return steps, padding.upper()
    pairs = [tuple(pair) for pair in padding]
    if [len(pair) for pair in pairs] != [2, 2]:
        raise ValueError(
            "`padding` must have a (low, high) pair for height and one for width, got "
            f"{padding!r}."
        )
    return steps, tuple((low, high) for low, high in pairs)


def _check_floating(arrays: Mapping[str, jax.Array]) -> None:
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"`{name}` must be floating, got {array.dtype}; convert it with "
                "`.astype(jnp.float32)`."
            )


def _check_norm(norm: Any, channels: int) -> None:
    if not isinstance(norm, Norm):
        raise ValueError(
            f"`norm` must be a Norm, as `norm_of` makes it, got {type(norm).__name__}."
        )
    named = {f"norm.{name}": jnp.asarray(v) for name, v in norm._asdict().items()}
    _check_vectors(named, channels)
    for name, vector in named.items():
        if vector.dtype != jnp.float32:
            raise ValueError(f"`{name}` must be float32, got {vector.dtype}.")


def _check_vectors(vectors: Mapping[str, jax.Array], channels: int) -> None:
    _check_floating(vectors)
    for name, vector in vectors.items():
        if vector.shape != (channels,):
            raise ValueError(
                f"`{name}` must have one value per channel, expected ({channels},), "
                f"got {vector.shape}; channels are the last axis."
            )
