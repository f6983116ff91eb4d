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
        ahead: steps whose batches are made at once.
    """

    examples: int
    batch_size: int
    shuffle: bool = True
    augment: Augment | None = None
    ahead: int = 1

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
        # The second is read only where a call starts within an epoch. A `lax.cond` for
        # it would make the host wait for all that came before, at every call.
        epochs = epoch + jnp.arange(2, dtype=jnp.int32)
        both = lax.map(lambda number: self.order(key, number), epochs)
        both = both.reshape(2 * self.steps, self.batch_size)
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
        return augmented(self.augment, lax.optimization_barrier(batch), key, step)

    def block(
        self,
        data: Any,
        rows: Int32[Array, "ahead batch"],
        key: jax.Array,
        first: Int32[Array, ""],
    ) -> Any:
        """Return the batches of `ahead` steps, stacked, in kernels for all of them.

        Args:
            data: pytree of arrays `[examples, ...]`.
            rows: of the steps.
            key: of the state.
            first: number of the first step.
        """
        if self.ahead == 1:
            one = self.take(data, rows[0], key, first)
            return jax.tree.map(lambda x: x[None], one)
        numbers = first + jnp.arange(self.ahead, dtype=jnp.int32)
        batches = jax.vmap(self.take, in_axes=(None, 0, None, 0))(
            data, rows, key, numbers
        )
        return lax.optimization_barrier(batches)

    def batch(self, data: Any, key: jax.Array, step: Int32[Array, ""]) -> Any:
        """Return the batch of a step of any number, by the program of its epoch."""
        if self.ahead == 1:
            rows = self.order(key, step // self.steps)[step % self.steps]
            return self.take(data, rows, key, step)
        rows = self.rows(key, step)[: self.ahead]
        return jax.tree.map(lambda x: x[0], self.block(data, rows, key, step))


def augmented(
    augment: Augment, batch: Any, key: jax.Array, step: Int32[Array, ""]
) -> Any:
    """Return a batch augmented: its first entry if it is a tuple or list, else all.

    Args:
        augment: see :func:`rjax.capture_epoch`.
        batch: of the step.
        key: of the state.
        step: its number.
    """
    own = _stream(key, _AUGMENT, step)
    if type(batch) in (tuple, list):
        return type(batch)([augment(own, batch[0]), *batch[1:]])
    return augment(own, batch)


def nearest_divisor(number: int, wanted: int, of: int = 1) -> int:
    """Return the divisor of a number, a multiple of `of`, that is nearest to another.

    Args:
        number: what it divides, a multiple of `of`.
        wanted: what it is near to; of two as near, the smaller is taken.
        of: what divides it.

    Example:
        >>> nearest_divisor(44, 10), nearest_divisor(300, 70, of=20)
        (11, 60)
    """
    fitting = (k for k in range(of, number + 1, of) if number % k == 0)
    return min(fitting, key=lambda k: abs(k - wanted))


def _stream(key: jax.Array, name: int, number: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, name), number)
