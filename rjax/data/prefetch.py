"""Batches that are copied to the device while the step works on the one before."""

import atexit
import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from rjax.data.errors import DataError
from rjax.data.handover import Handover, Waited
from rjax.data.inputs import Signature, owned, signature_of
from rjax.table import Row

# Seconds that closing waits for a read under way; a longer one is left to itself.
_PATIENCE = 5.0


def prefetch(batches: Iterable[Any], sharding: Any = None) -> "Prefetch":
    """Copy batches to the device ahead of the steps that use them.

    Equals `map(functools.partial(jax.device_put, device=sharding), batches)` bit for
    bit and in the same order. There are two buffers, A and B: while the step works on
    the batch in one, a thread reads the next batch and copies it into the other. So at
    most two batches lie on the device, and one more on the host. (JAX keeps the memory
    of a deleted array for steps that were issued and still read it.)

    A batch is the caller's until the next one is asked for; then its arrays are
    deleted, which gives their memory to the batch after that. The last one stays. Copy
    what else has to (`jax.tree.map(jnp.copy, batch)`).

    The source is read two batches ahead, from another thread, from the moment of the
    call on. It may reuse its memory: it is asked for a batch once the one before is
    copied. What it raises is raised here, in its turn.

    Args:
      batches: pytrees of NumPy arrays, all of the structure, shapes and dtypes of the
        first, since a step compiles anew for others. Gets dtypes as `jax.device_put`
        gives them: int64 is int32 unless 64-bit types are enabled.
      sharding: where the arrays go, a `jax.sharding.Sharding`, a device, or a tree of
        them as `jax.device_put` takes it; the default device if `None`.

    Returns:
      An iterator of the batches as `jax.Array`s, which is a context manager, too:
      leaving it, dropping it, or `close()` ends the thread.

    Raises:
      ValueError: `batches` is not iterable, or `sharding` is none.
      DataError: from the iterator, a batch that differs from the first or that JAX
        cannot hold.

    Example:
      >>> import jax.numpy as jnp
      >>> pairs = [(np.full((4, 2), i, np.float32), np.arange(4)) for i in range(3)]
      >>> step = jax.jit(lambda total, batch: total + batch[0].sum())
      >>> total = jnp.float32(0)
      >>> with prefetch(pairs) as batches:
      ...     for batch in batches:
      ...         total = step(total, batch)
      >>> float(total), batches.nbytes
      (24.0, 96)

    Source: regions `I_A_LABEL` to `I_B_DATA` of the article.
    """
    return Prefetch(batches, sharding)


class Prefetch(Iterator[Any]):
    """The iterator that `prefetch` returns; see there."""

    def __init__(self, batches: Iterable[Any], sharding: Any = None) -> None:
        self._handover = Handover()
        self._thread = threading.Thread(
            target=_fill,
            args=(_iterator(batches), _Copier(sharding), self._handover),
            name="rjax-prefetch",
            daemon=True,
        )
        _running[self._handover] = self._thread
        weakref.finalize(self, self._handover.close).atexit = False
        self._thread.start()

    def __next__(self) -> Any:
        return self._handover.take()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; batches not yet handed out are dropped.

        A read that is under way is waited for, for five seconds at most.
        """
        _end(self._handover, self._thread)

    @property
    def waited(self) -> Waited:
        """Seconds for which the loop waited for batches so far, by their cause.

        The input is what limits the training where `source` and `copy` are a large
        part of its time and `device` is next to nothing.
        """
        return self._handover.waited()

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers on the device; waits for the first batch."""
        return sum(row.nbytes or 0 for row in self.regions())

    def regions(self) -> tuple[Row, ...]:
        """Return the rows of `Plan.regions()` that the plan cannot know: 050 to 053.

        Integer leaves with one axis, a number for each example, are labels; all others
        are data. A leaf that is sharded or replicated counts once. Waits for the first
        batch, without which all are empty.
        """
        return (self._handover.signature() or Signature(None, ())).rows()


class _Copier:
    """`jax.device_put` as the thread that made this would call it."""

    def __init__(self, sharding: Any) -> None:
        self._sharding = sharding
        self._default_device = jax.default_device.value
        self._x64 = jax.enable_x64.value
        devices = _devices(sharding)
        self._device = devices[0]
        # An array on a CPU may share the memory of the NumPy array that it was put
        # from, and the source may write there again.
        self._shares = any(device.platform == "cpu" for device in devices)

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Make that thread's settings those of this one."""
        with jax.default_device(self._default_device), jax.enable_x64(self._x64):
            yield

    def put(self, batch: Any) -> tuple[jax.Array, Any]:
        """Begin to copy a batch; return a marker, and the batch on the device.

        The marker is there as soon as the copy is no longer queued behind steps.
        """
        marker = jax.device_put(np.int8(0), self._device)
        batch = owned(batch) if self._shares else batch
        try:
            return marker, jax.device_put(batch, self._sharding)
        except ValueError as error:
            shapes = ", ".join(str(list(np.shape(x))) for x in jax.tree.leaves(batch))
            raise ValueError(
                f"`sharding` does not fit batches of shapes {shapes}: it must be a "
                "tree prefix of a batch, and divide every axis that it splits."
            ) from error


def _fill(source: Iterator[Any], copier: _Copier, handover: Handover) -> None:
    """Copy batch after batch into whichever buffer is free. What the thread runs."""
    first, number = None, 0
    try:
        with copier.settings():
            # No `enumerate`: it holds on to a batch until it has the next one.
            for batch in source:
                found = signature_of(batch, number)
                if first is None:
                    first = found
                    handover.describe(first)
                if difference := first.difference(found):
                    raise DataError(
                        f"batch {number} {difference}: pad or drop what does not fill "
                        "a batch, since the step would compile anew."
                    )
                handover.enter("copy")
                if not handover.room():
                    return
                marker, copy = copier.put(batch)
                handover.give(copy)
                handover.enter("device")
                marker.block_until_ready()
                handover.enter("copy")
                # The source may write over the batch once it is asked for the next.
                jax.block_until_ready(copy)
                del batch, copy
                number += 1
                handover.enter("source")
        handover.end()
    except BaseException as error:  # of the source: for the loop to handle
        handover.end(error)


def _iterator(batches: Iterable[Any]) -> Iterator[Any]:
    try:
        return iter(batches)
    except TypeError:
        raise ValueError(
            "`batches` must be an iterable of pytrees of NumPy arrays, got "
            f"{type(batches).__name__}; rjax.data.train_batches makes one."
        ) from None


def _devices(sharding: Any) -> list[Any]:
    """Return the devices that batches go to, or say that `sharding` is none."""
    if sharding is None:
        return list(jax.device_put(np.int8(0)).devices())
    devices: set[Any] = set()
    for one in jax.tree.leaves(sharding) or [sharding]:
        if isinstance(one, jax.Device):
            devices.add(one)
        elif isinstance(one, jax.sharding.Sharding):
            devices |= one.addressable_devices
        else:
            raise ValueError(
                "`sharding` must be a jax.sharding.Sharding, a device or a tree of "
                f"them, got {one!r}; a PartitionSpec needs its mesh, as in "
                "jax.sharding.NamedSharding(mesh, spec)."
            )
    return sorted(devices, key=lambda device: device.id)


def _end(handover: Handover, thread: threading.Thread) -> None:
    handover.close()
    thread.join(_PATIENCE)


# By what each has in common with its loop; gone with the thread and the iterator.
_running: weakref.WeakKeyDictionary[Handover, threading.Thread] = (
    weakref.WeakKeyDictionary()
)


@atexit.register
def _end_all() -> None:
    """End every thread before JAX, which was imported first, takes its devices down."""
    for handover, thread in list(_running.items()):
        _end(handover, thread)
