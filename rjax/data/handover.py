"""Where the thread that fills two buffers meets the loop that empties them."""

import collections
import dataclasses
import threading
import time
from typing import Any, Literal

import jax

from rjax.data.inputs import Signature

Phase = Literal["source", "copy", "device"]


@dataclasses.dataclass(frozen=True)
class Waited:
    """Seconds for which a loop waited for batches, by what the thread did meanwhile.

    Attributes:
      source: reading a batch.
      copy: copying one to the device.
      device: nothing, for the device was still busy with steps that were issued before
        the copy. Where this is much, the input is fast enough.
    """

    source: float = 0.0
    copy: float = 0.0
    device: float = 0.0


class Handover:
    """Two buffers: what is copied and not yet asked for, and what the loop has.

    Every method may be called at any time by either thread. Nothing waits after
    `close`.
    """

    def __init__(self) -> None:
        # Reentrant: the collector of garbage may call `close` from within.
        self._changed = threading.Condition(threading.RLock())
        self._ready: collections.deque[Any] = collections.deque()
        self._out: list[jax.Array] | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._first: Signature | None = None
        self._phase: Phase = "source"
        self._waited: dict[Phase, float] = {"source": 0.0, "copy": 0.0, "device": 0.0}
        self._waiting_since: float | None = None

    def describe(self, first: Signature) -> None:
        """Say what the first batch, and so every batch, is like."""
        with self._changed:
            self._first = first
            self._changed.notify_all()

    def signature(self) -> Signature | None:
        """Wait for the first batch and return what it is like, `None` without any."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._first is not None)
            return self._first

    def room(self) -> bool:
        """Wait until one of the buffers is free; return whether to fill it."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._in_use() < 2)
            return not self._ended

    def give(self, batch: Any) -> None:
        """Hand over a batch whose copy is under way."""
        with self._changed:
            if not self._ended:
                self._ready.append(batch)
                self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """Say that no batch follows, and why if it is for an error."""
        with self._changed:
            if not self._ended:
                self._ended, self._error = True, error
                self._changed.notify_all()

    def close(self) -> None:
        """End it from the side of the loop; what was not asked for is dropped."""
        with self._changed:
            self._ended, self._error, self._out = True, None, None
            self._ready.clear()
            self._changed.notify_all()

    def take(self) -> Any:
        """Give back the batch that the loop has, and return the next one.

        That waits until the copy of the batch after it is under way, too: a copy to a
        GPU waits for the steps that were issued before it, so it can only run beside
        the step for which this batch is taken.

        Raises:
          StopIteration: there is none.
          BaseException: what `end` was told, in its turn.
        """
        with self._changed:
            self._give_back()
            self._wait(lambda: self._ended or len(self._ready) == 2)
            if self._ready:
                batch = self._ready.popleft()
                self._out = jax.tree.leaves(batch)
                return batch
            error, self._error = self._error, None
        raise StopIteration if error is None else error

    def enter(self, phase: Phase) -> None:
        """Say what the thread does from now on."""
        with self._changed:
            self._count()
            self._phase = phase

    def waited(self) -> Waited:
        """Return for how long `take` waited so far."""
        with self._changed:
            self._count()
            return Waited(**self._waited)

    def _in_use(self) -> int:
        return len(self._ready) + (self._out is not None)

    def _give_back(self) -> None:
        # Not left to the collector: the loop's variable still names the batch. The
        # last one may stay, since nothing needs its memory.
        if self._out is not None and (self._ready or not self._ended):
            for array in self._out:
                array.delete()
        self._out = None
        self._changed.notify_all()

    def _wait(self, ready: Any) -> None:
        self._waiting_since = time.perf_counter()
        try:
            self._changed.wait_for(ready)
        finally:
            self._count()
            self._waiting_since = None

    def _count(self) -> None:
        if self._waiting_since is not None:
            now = time.perf_counter()
            self._waited[self._phase] += now - self._waiting_since
            self._waiting_since = now
