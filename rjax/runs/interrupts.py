"""Ctrl-C and SIGTERM as exceptions that never split a write in two."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The process was asked to stop.

    Attributes:
        code: the exit code that a shell expects, 128 + the signal's number.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.code = 128 + signum


class Interrupts:
    """While entered, both signals raise `Interrupted`, but not inside `held`.

    Outside the main thread, where Python handles no signals, nothing changes.

    Example:
        >>> with Interrupts() as interrupts:
        ...     with interrupts.held():
        ...         print("written whole")
        written whole
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._depth = 0
        self._waiting: int | None = None
        self._former: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            self._former = {s: signal.signal(s, self._arrive) for s in self._SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let a first signal wait until the body is done; a second one is obeyed.

        Bodies may nest; the outermost one counts.
        """
        with self._counted():
            yield
        if not self._depth:
            self.obey()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """As `held`, around the end of the work: nothing is left to stop then."""
        with self._counted():
            yield
        if not self._depth:
            self._waiting = None

    def obey(self) -> None:
        """Raise what came while it was held."""
        if self._waiting is not None:
            signum, self._waiting = self._waiting, None
            raise Interrupted(signum)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _arrive(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self._depth and self._waiting is None:
            self._waiting = signum
        else:
            raise Interrupted(signum)
