"""Taps: a legal way for a half-precision kernel to get a float32 gradient.

JAX wants every cotangent in the dtype of its primal. Inside the context below, a
registered kernel's gradient is instead delivered to a float32 companion of zeros, its
*tap*: differentiate with respect to both, and `float32(d kernel) + d tap` is the
gradient. Whatever does not go through `dense` with that very kernel object (a tied
weight, a transpose, a scan or jit that was handed the kernel as an argument) arrives
in `d kernel` as ever, so the sum is right in every case.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Taps:
    """Which taps a trace has used.

    Attributes:
      used: positions in `kernels` whose tap took part; the gradient of every other tap
        is exactly zero, so leaving it out of the sum saves a pass and changes nothing.
    """

    used: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class _Entry:
    kernel: jax.Array  # held, so that its id cannot be taken over by another object
    tap: jax.Array
    position: int
    record: Taps


_ACTIVE: contextvars.ContextVar[Mapping[int, _Entry] | None] = contextvars.ContextVar(
    "rjax_float32_weight_gradients", default=None
)


@contextlib.contextmanager
def float32_weight_gradients(
    kernels: Sequence[jax.Array], taps: Sequence[jax.Array]
) -> Iterator[Taps]:
    """Deliver the weight gradients of `dense` to float32 taps.

    Enter it inside the differentiated function, with the kernels that the model will
    see as they are (the same objects). Contexts nest; the innermost one that knows a
    kernel serves it.

    Args:
      kernels: arrays of any floating dtype, usually tracers.
      taps: float32 zeros, `taps[i]` of the shape of `kernels[i]`.

    Yields:
      `Taps`, whose `used` is complete once the model has been traced.

    Raises:
      ValueError: the two sequences do not match, or a tap is not float32.

    Example:
      >>> from rjax.ops.dense import dense
      >>> x, w = jnp.ones((3, 2), jnp.float16), jnp.ones((2, 1), jnp.float16)
      >>> def loss(w, tap):
      ...     with float32_weight_gradients([w], [tap]):
      ...         return dense(x, w).sum()
      >>> dw, dtap = jax.grad(loss, argnums=(0, 1))(w, jnp.zeros((2, 1)))
      >>> (dw.astype(jnp.float32) + dtap).ravel()
      Array([3., 3.], dtype=float32)
    """
    _validate(kernels, taps)
    record = Taps()
    pairs = zip(kernels, taps, strict=True)
    own = {id(k): _Entry(k, t, i, record) for i, (k, t) in enumerate(pairs)}
    token = _ACTIVE.set({**(_ACTIVE.get() or {}), **own})
    try:
        yield record
    finally:
        _ACTIVE.reset(token)


def find_tap(kernel: Any) -> jax.Array | None:
    """Return the tap of a registered kernel and mark it used, or return None.

    Args:
      kernel: the object that `dense` was called with.

    Returns:
      The float32 tap, or `None` if this very object is not registered.

    Example:
      >>> find_tap(jnp.ones((2, 2))) is None
      True
    """
    entry = (_ACTIVE.get() or {}).get(id(kernel))
    if entry is None:
        return None
    assert entry.kernel is kernel
    entry.record.used.add(entry.position)
    return entry.tap


def _validate(kernels: Sequence[jax.Array], taps: Sequence[jax.Array]) -> None:
    if len(kernels) != len(taps):
        raise ValueError(
            f"`taps` must have one array per kernel, expected {len(kernels)}, got "
            f"{len(taps)}; make them with `jnp.zeros(kernel.shape)`."
        )
    for i, (kernel, tap) in enumerate(zip(kernels, taps, strict=True)):
        if tap.shape != kernel.shape or tap.dtype != jnp.float32:
            raise ValueError(
                f"`taps[{i}]` must be float32 of shape {kernel.shape}, got {tap.dtype} "
                f"of shape {tap.shape}; make it with `jnp.zeros(kernel.shape)`."
            )
