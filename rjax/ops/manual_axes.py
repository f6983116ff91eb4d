"""Agreement on manual mesh axes, for ops with their own backward pass.

Inside `shard_map` a weight may be the same on all devices while the batch varies.
Plain JAX ops then cast the weight to varying by themselves; a `custom_vjp` has to be
given arguments that already agree, or its backward pass fails to type-check.
"""

import jax
from jax import lax


def align(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Cast arrays so that all of them vary over the same manual mesh axes.

    Equals the identity outside `shard_map` (and with `check_vma=False`). The
    transpose of the cast is a sum over devices in the array's own dtype.

    Args:
      *arrays: arrays of any shape and dtype.

    Returns:
      The arrays in the same order, each the same object if nothing had to change.

    Example:
      >>> x = jax.numpy.ones(3)
      >>> align(x, x)[0] is x
      True
    """
    axes = [frozenset(jax.typeof(x).manual_axis_type.varying) for x in arrays]
    union = frozenset[str]().union(*axes)
    return tuple(
        lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(arrays, axes, strict=True)
    )
