"""The batches of a run: from the host one by one, or made on the device."""

from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rjax
from rjax.programs.sampling import Augment, Sampling, augmented, nearest_divisor
from rjax.runs.errors import UsageError

# Bytes of images that are augmented at once, in kernels for many steps together.
_AUGMENTED = 2**26


def from_host(
    examples: Any, batch_size: int, seed: int, steps: range, augment: Augment | None
) -> Generator[Any, None, None]:
    """Return the batches of some steps, augmented on the device."""
    start, stop = steps.start, steps.stop
    batches = rjax.data.train_batches(examples, batch_size, seed, start, stop)
    if augment is None:
        return batches
    return _augmented(batches, augment, seed, start)


def _augmented(
    batches: Generator[Any, None, None], augment: Augment, seed: int, start: int
) -> Generator[Any, None, None]:
    key = jax.random.key(seed)
    change = jax.jit(lambda batch, step: augmented(augment, batch, key, step))
    try:
        for step, batch in enumerate(batches, start):
            yield change(batch, np.int32(step))
    finally:
        batches.close()  # threads may be reading ahead


def on_device(
    sampling: Sampling, examples: Any, seed: int, stop: int
) -> Generator[Any, None, None]:
    """Return the batches of the steps before `stop`: those of whole epochs.

    Args:
        sampling: which examples a step takes, and what becomes of them.
        examples: pytree of arrays.
        seed: that of the state.
        stop: number of steps.
    """

    @jax.jit
    def made(examples: Any, key: jax.Array, first: jax.Array) -> Any:
        rows = sampling.rows(key, first)[: sampling.ahead]
        return sampling.block(examples, rows, key, first)

    key, examples = jax.random.key(seed), jax.tree.map(jnp.asarray, examples)
    for first in range(0, stop, sampling.ahead):
        block = made(examples, key, np.int32(first))
        for i in range(min(sampling.ahead, stop - first)):
            yield jax.tree.map(lambda x, i=i: x[i], block)


def resident(train: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return training images and labels as they will lie on the device.

    Args:
        train: images and labels, or a grain dataset.
        dtype: of the images: that of the step, which would round them to it anyway.

    Raises:
        UsageError: for images that are read one by one.
    """
    if not isinstance(train, tuple):
        raise UsageError(
            "--whole-epochs needs data that lie in memory, and pictures of a folder "
            "are read one by one: leave it out"
        )
    images, labels = train
    return images.astype(dtype), labels


def shapes(examples: Any, batch_size: int) -> Any:
    """Return the shapes of a batch; no augmentation here changes them."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype), examples
    )


def check_room(arrays: Any) -> None:
    """Raise a `UsageError` if arrays do not fit on the device, as far as it says."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return
    needed = sum(x.nbytes for x in jax.tree.leaves(arrays))
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    if needed > free:
        raise UsageError(
            f"--whole-epochs needs {needed / 1e9:.1g} GB on the device, which has "
            f"{free / 1e9:.1g} left: say --no-whole-epochs"
        )


def steps_ahead(steps: int, every: int, nbytes: int) -> int:
    """Return how many steps of an epoch to augment at once.

    Args:
        steps: of an epoch.
        every: steps from one digest to the next, 0 for none.
        nbytes: of the images of a step.

    Example:
        >>> steps_ahead(300, 10, 200 * 28 * 28 * 2)
        150
    """
    every, most = every or 1, _AUGMENTED // nbytes
    fitting = [k for k in range(every, most + 1, every) if steps % k == 0]
    return max(fitting, default=1)


def digests_every(every: int, steps: int) -> int:
    """Return how many steps apart digests fall due in whole epochs: `every` or near."""
    return nearest_divisor(steps, every) if every else 0
