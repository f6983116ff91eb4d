"""Which examples a step takes, a pure function of its number and the key.

There is nothing to save and nothing to go stale. With n steps in an epoch, step i is
number `i % n` of epoch `i // n`; both counts and the key lie in the state.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

Augment = Callable[[jax.Array, Any], Any]

# Beyond the number of any step, so that no step draws from these streams of its key.
_SHUFFLE = 2**32 - 1
_AUGMENT = 2**32 - 2


@dataclasses.dataclass(frozen=True, eq=False)
class Sampling:
    """The batches of a run over data on the device.

    Attributes:
        examples: how many there are.
        batch_size: examples a step; what an epoch has beyond full batches is dropped,
            other examples in each epoch if they are shuffled.
        shuffle: whether each epoch has an order of its own.
        augment: see :func:`rjax.capture_epoch`.
    """

    examples: int
    batch_size: int
    shuffle: bool = True
    augment: Augment | None = None

    @property
    def steps(self) -> int:
        """Return how many an epoch has."""
        return self.examples // self.batch_size

    def order(
        self, key: jax.Array, epoch: Int32[Array, ""]
    ) -> Int32[Array, "steps batch"]:
        """Return the examples of every step of an epoch.

        Args:
            key: of the state.
            epoch: its number.
        """
        rows = jnp.arange(self.examples, dtype=jnp.int32)
        if self.shuffle:
            rows = jax.random.permutation(_stream(key, _SHUFFLE, epoch), rows)
        rows = rows[: self.steps * self.batch_size]
        return rows.reshape(self.steps, self.batch_size)

    def rows(
        self, key: jax.Array, step: Int32[Array, ""]
    ) -> Int32[Array, "steps batch"]:
        """Return the examples of as many steps as an epoch has, from any step on.

        Args:
            key: of the state.
            step: number of the first.
        """
        epoch, within = step // self.steps, step % self.steps
        first = self.order(key, epoch)
        # Once a call, and the branch is taken only where it starts within an epoch.
        second = lax.cond(
            within > 0, self.order, lambda *_: jnp.zeros_like(first), key, epoch + 1
        )
        both = jnp.concatenate([first, second])
        return lax.dynamic_slice_in_dim(both, within, self.steps)

    def take(
        self,
        data: Any,
        rows: Int32[Array, " batch"],
        key: jax.Array,
        step: Int32[Array, ""],
    ) -> Any:
        """Return the batch of a step.

        The barrier keeps the gathering from fusing into what follows, so that its bits
        do not depend on what is around it.

        Args:
            data: pytree of arrays `[examples, ...]`.
            rows: of the step.
            key: of the state.
            step: its number.

        Returns:
            The same pytree, of arrays `[batch, ...]`, unless `augment` makes others.
        """

        def taken(x: jax.Array) -> jax.Array:
            return x.at[rows].get(mode="promise_in_bounds")

        batch = jax.tree.map(taken, data)
        if self.augment is None:
            return batch
        batch = lax.optimization_barrier(batch)
        own = _stream(key, _AUGMENT, step)
        if type(batch) in (tuple, list):
            return type(batch)([self.augment(own, batch[0]), *batch[1:]])
        return self.augment(own, batch)

    def batch(self, data: Any, key: jax.Array, step: Int32[Array, ""]) -> Any:
        """Return the batch of a step of any number."""
        rows = self.order(key, step // self.steps)[step % self.steps]
        return self.take(data, rows, key, step)


def _stream(key: jax.Array, name: int, number: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, name), number)
