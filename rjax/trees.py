"""Trees: what makes a class one, paths of leaves, checks of parameters."""

import functools
from typing import Any, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")


def pytree(cls: type[T]) -> type[T]:
    """Make a dataclass of arrays a pytree, which `jax.export` can also keep in a file.

    Its name there is `rjax.<class>`; nothing else of it is kept, and nothing pickled.
    """
    jax.tree_util.register_dataclass(cls)
    jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"rjax.{cls.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: (),
        from_children=lambda aux_data, children: cls(*children),
    )
    return cls


def flatten(tree: Any, keep_none: bool = False) -> tuple[list[tuple[str, Any]], Any]:
    """Return ([(path, leaf)], treedef); a path is like "block1/conv/kernel"."""
    is_leaf = (lambda x: x is None) if keep_none else None
    found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return [(name(keys), leaf) for keys, leaf in found], treedef


def dtype_of(leaf: Any) -> Any:
    """Return the dtype of anything array-like."""
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def check_floating(path: str, leaf: Any) -> None:
    """Raise a `ValueError` naming `path` unless the leaf is a floating array."""
    dtype = dtype_of(leaf)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"Parameter {path!r} must be floating, got {dtype}; keep counters, masks "
            "and keys outside the parameter tree."
        )


def check_distinct(name: str, found: list[tuple[str, Any]]) -> None:
    """Raise a `ValueError` if two leaves have one path, as "a/b" and "b" in "a"."""
    seen: set[str] = set()
    for path, _ in found:
        if path in seen:
            raise ValueError(
                f"`{name}` has two leaves of the path {path!r}; keep '/' out of keys."
            )
        seen.add(path)
