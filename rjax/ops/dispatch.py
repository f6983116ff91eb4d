"""Which implementation of an op serves a call.

Every op has a table from implementation name to function. The plain XLA version is
always in it; where a kernel cannot serve, the table holds the sentence that says why.
"""

from collections.abc import Callable, Mapping
from typing import Any

IMPLEMENTATIONS = ("xla", "mosaic_gpu")


def resolve(
    op: str,
    implementation: str | None,
    available: Mapping[str, Callable[..., Any] | str],
) -> Callable[..., Any]:
    """Return the function that serves `op`.

    Equals `available[implementation or "xla"]`, with words for what is missing.

    Args:
      op: name of the op, for the error text.
      implementation: `"xla"`, `"mosaic_gpu"`, or `None` for the default.
      available: by name, the function that can serve this call, or why none can.

    Returns:
      The chosen function.

    Raises:
      ValueError: `implementation` is not a known name.
      NotImplementedError: it is known, but cannot serve this op here.

    Example:
      >>> resolve("negate", None, {"xla": lambda x: -x})(2)
      -2
    """
    name = "xla" if implementation is None else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"`implementation` must be None or one of {IMPLEMENTATIONS}, got "
            f"{implementation!r}; leave it at None to let rjax choose."
        )
    found = available.get(name, "there is none")
    if isinstance(found, str):
        raise NotImplementedError(
            f"`{op}` has no {name!r} implementation for this call: {found}; leave "
            "`implementation` at None."
        )
    return found
