"""Which implementation of an op serves a call.

Every op has a table from implementation name to function. The plain XLA version is
always in it; where a kernel cannot serve, the table holds the sentence that says why.
Where nothing is named, the kernel serves if it was measured to be the faster one on
this kind of device near this size (:mod:`rjax.ops.tuned`), else XLA.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from rjax.ops import tuned

IMPLEMENTATIONS = ("xla", "mosaic_gpu")


def choose(
    op: str,
    implementation: str | None,
    available: Mapping[str, Callable[..., Any] | str],
    size: tuple[str, int] | None = None,
) -> str:
    """Return the name of the implementation that serves a call of `op`.

    Args:
      op: name of the op, for the error text.
      implementation: `"xla"`, `"mosaic_gpu"`, or `None` for the default.
      available: by name, the function that can serve this call, or why none can.
      size: what to look up in the table of measurements, and the number of elements;
        `None` for an op that was not measured.

    Raises:
      ValueError: `implementation` is not a known name.
      NotImplementedError: it is known, but cannot serve this op here.
    """
    if implementation is None:
        can = callable(available.get("mosaic_gpu"))
        faster = can and size is not None and tuned.prefers_kernel(*size)
        return "mosaic_gpu" if faster else "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"`implementation` must be None or one of {IMPLEMENTATIONS}, got "
            f"{implementation!r}; leave it at None to let rjax choose."
        )
    found = available.get(implementation, "there is none")
    if isinstance(found, str):
        raise NotImplementedError(
            f"`{op}` has no {implementation!r} implementation for this call: {found}; "
            "leave `implementation` at None."
        )
    return implementation


def resolve(
    op: str,
    implementation: str | None,
    available: Mapping[str, Callable[..., Any] | str],
    size: tuple[str, int] | None = None,
) -> Callable[..., Any]:
    """Return the function that serves `op`; arguments and errors as :func:`choose`.

    A kernel that was chosen, not named, steps aside where only XLA can follow: it is
    differentiated and batched as the XLA version is.

    Example:
      >>> resolve("negate", None, {"xla": lambda x: -x})(2)
      -2
    """
    name = choose(op, implementation, available, size)
    found: Any = available[name]
    if implementation is None and name != "xla":
        return guarded(found, available["xla"])
    return found


def guarded(kernel: Any, base: Any) -> Callable[..., Any]:
    """Return `kernel`, differentiated and batched as `base`.

    Args:
      kernel: function of pytrees of arrays.
      base: function of the same arguments that JAX can differentiate and batch.
    """

    @custom_vmap
    def batched(*args: Any) -> Any:
        return kernel(*args)

    @batched.def_vmap
    def _(size: int, in_batched: Any, *args: Any) -> Any:
        del size
        axes = jax.tree.map(lambda b: 0 if b else None, in_batched)
        out = jax.vmap(base, in_axes=axes)(*args)
        return out, jax.tree.map(lambda _: True, out)

    @jax.custom_jvp
    def run(*args: Any) -> Any:
        return batched(*args)

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(base, primals, tangents)

    return run
