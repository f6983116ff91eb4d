"""How states, reports and programs show themselves: a line of text, one look in HTML.

Nothing here computes: an array that is traced, given away or planned only is told by
its dtype and shape.
"""

import html
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Rows = Sequence[tuple[str, str]]


def value(x: Any) -> str:
    """Return a scalar's value, else dtype and shape, else how many arrays there are.

    Example:
        >>> value(jnp.float32(8192)), value(jnp.zeros((2, 3))), value({"a": 1, "b": 2})
        ('8192', 'float32[2, 3]', '2 arrays')
    """
    if x is None:
        return "none"
    if not hasattr(x, "shape"):
        leaves = jax.tree.leaves(x)
        return "none" if not leaves else count(len(leaves), "array")
    known = isinstance(x, np.ndarray | np.generic | jax.Array)
    if not known or isinstance(x, Tracer) or x.shape != ():
        return kind(x)
    if isinstance(x, jax.Array) and x.is_deleted():
        return "given away"
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return "random key"
    found = x.item()
    return f"{found:.6g}" if isinstance(found, float) else str(found)


def kind(x: Any) -> str:
    """Return dtype and shape, and whether it was given away to a step."""
    gone = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    gone = gone and x.is_deleted()
    shape = ", ".join(map(str, x.shape))
    return f"{x.dtype}[{shape}]" + (", given away" if gone else "")


def nbytes(tree: Any) -> int:
    """Return the bytes of all arrays of a tree, those of a random key left out."""
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]
    plain = [x for x in leaves if not jnp.issubdtype(x.dtype, jax.dtypes.extended)]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in plain)


def text(name: str, rows: Rows) -> str:
    """Return one line.

    Example:
        >>> text("Report", [("loss", "0.5"), ("applied", "True")])
        'Report(loss=0.5, applied=True)'
    """
    return f"{name}({', '.join(f'{label}={words}' for label, words in rows)})"


def count(n: int, what: str) -> str:
    """Return a number of things.

    Example:
        >>> count(1, "array"), count(12, "array")
        ('1 array', '12 arrays')
    """
    return f"{n:,} {what}" + "s" * (n != 1)


def headed(title: str, summary: str, *parts: str) -> str:
    """Return the line that all displays begin with, and what stands below it.

    Example:
        >>> headed("stages", "41 kernels", "<table></table>")
        '<div><p><b>rjax stages</b>: 41 kernels</p><table></table></div>'
    """
    line = f"<p><b>rjax {title}</b>: {html.escape(summary)}</p>"
    return f"<div>{line}{''.join(parts)}</div>"


def folded(label: str, body: str) -> str:
    """Return HTML that a click on its label shows."""
    return f"<details><summary>{html.escape(label)}</summary>{body}</details>"


def page(title: str, summary: str, rows: Rows) -> str:
    """Return a line and, folded, a table, for a light and a dark page.

    Example:
        >>> "<b>rjax report</b>: fine" in page("report", "fine", [("loss", "0.5")])
        True
    """
    body = "".join(
        f"<tr><td style='text-align:left'>{html.escape(label)}</td>"
        f"<td style='text-align:right'>{html.escape(words)}</td></tr>"
        for label, words in rows
    )
    table = f"<table><tbody>{body}</tbody></table>"
    return headed(title, summary, folded(f"{len(rows)} fields", table))
