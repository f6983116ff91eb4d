"""An epoch as one compiled program, with the data that it goes through."""

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from rjax import displays
from rjax.programs.captured import Captured
from rjax.programs.sampling import Sampling
from rjax.programs.signature import leaves_of
from rjax.state import RegionState


class CapturedEpoch(Captured):
    """An epoch, or several, as one compiled program; made by :func:`capture_epoch`.

    Call it with a state: ``state, report = epoch(state)``. The state is given away to
    the call. All that a :class:`rjax.Captured` tells of itself, it tells of a call: its
    stages, memory and cost are those of all the steps, and the batch in them is the
    data. What :meth:`save` keeps is loaded as a program of ``(state, data)``, which no
    longer looks where a call starts: a recording refuses digests that lie elsewhere.

    Attributes:
        data: on the device; `None` if it was captured for their shapes.
        steps: of an epoch.
        epochs: of a call.
        every: steps from one digest to the next, 0 for none.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> loss_fn = rjax.stateless_loss(lambda p, x: jnp.float32(x @ p["w"]).mean())
        >>> state, x = rjax.init_state(plan, params), jnp.ones((3, 4), "float16")
        >>> step = rjax.make_train_step(loss_fn, plan)
        >>> data = jnp.ones((12, 4), "float16")
        >>> epoch = rjax.capture_epoch(step, state, data, batch_size=3)
        >>> epoch.steps, epoch.epochs
        (4, 1)
    """

    def __init__(
        self,
        program: Captured,
        sampling: Sampling,
        data: Any,
        *,
        epochs: int,
        every: int,
    ) -> None:
        super().__init__(
            program.name,
            program.signature,
            program._compiled,
            program.plan,
            export=program._export,
            results=program._results,
            trees=program._trees,
            compile_seconds=program.compile_seconds,
        )
        self.steps, self.epochs, self.every = sampling.steps, epochs, every
        self._wanted = leaves_of("data", data), jax.tree.structure(data)
        shapes = [isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(data)]
        self.data: Any = None if any(shapes) else self._placed(data)
        self._batch = jax.jit(sampling.batch)
        # The counter that the last call has returned, and what it will say.
        self._counter: tuple[Any, int] = (None, 0)

    def __call__(self, state: Any, data: Any = None) -> tuple[Any, Any]:
        """Train for the epochs of a call.

        Args:
            state: as `signature.state` says; given away.
            data: others than those that it was captured with, of the same shapes; put
                on the device for this call.

        Returns:
            The new state and an :class:`rjax.EpochReport`.

        Raises:
            ValueError: for anything that it was not compiled for, a state that was
                given away before, or one that does not stand where digests fall due.
        """
        data = self._checked(data)
        at = self._check_turn(state) if self.every else 0
        state, report = super().__call__(state, data)
        if self.every:
            self._counter = state.step, at + self.epochs * self.steps
        return state, report

    def batch(self, state: RegionState, data: Any = None) -> Any:
        """Return the batch of the step that comes next.

        To take the steps of an epoch one by one, and to look at what they get::

            for _ in range(epoch.steps):
                state, report = step(state, epoch.batch(state))

        gives the same bits, with the `step` that was captured, jitted.

        Args:
            state: any; its `key` and `step` are looked at, and nothing is given away.
            data: as in a call.

        Raises:
            ValueError: for data that are not of the shapes.
        """
        return self._batch(self._checked(data), state.key, state.step)

    def _rows(self) -> list[tuple[str, str]]:
        found = dict(super()._rows())
        data = found.pop("batch")
        numbers = {"steps": self.steps, "epochs": self.epochs, "every": self.every}
        own = {name: str(number) for name, number in numbers.items()}
        return [*{"name": found.pop("name"), **own, "data": data, **found}.items()]

    def _summary(self) -> str:
        steps = displays.count(self.steps, "step")
        epochs = displays.count(self.epochs, "epoch")
        return f"{super()._summary()}, {epochs} of {steps} a call"

    def _placed(self, data: Any) -> Any:
        shardings = jax.tree.unflatten(self._wanted[1], self._input_shardings()[1])
        return jax.device_put(data, shardings)

    def _checked(self, data: Any) -> Any:
        """Return the data to train on, on the device, or refuse those given."""
        if data is None:
            if self.data is None:
                raise ValueError(
                    "`data` must be given to every call, as the epoch was captured for "
                    "their shapes alone; pass arrays."
                )
            return self.data
        wanted, tree = self._wanted
        given = leaves_of("data", data)
        if jax.tree.structure(data) != tree:
            raise ValueError(
                f"`data` is {jax.tree.structure(data)}, the program was compiled for "
                f"{tree}; pass that, or capture the epoch again."
            )
        for old, new in zip(wanted, given, strict=True):
            if old != new:
                raise ValueError(
                    f"`{new.name}` is {new}, the program was compiled for {old}; pass "
                    "that, or capture the epoch again."
                )
        return self._placed(data)

    def _check_turn(self, state: Any) -> int:
        """Refuse a state after whose steps digests would fall due elsewhere.

        Return its number of steps. This waits for the device, but for the state that
        the last call has returned.
        """
        step = getattr(state, "step", None)
        known, at = self._counter
        if step is not known:
            if not _is_number(step):
                return 0  # the program has a sentence for it
            at = int(jax.device_get(step))
        if missing := -at % self.every:
            raise ValueError(
                f"`state` must stand after a multiple of every={self.every} steps, "
                f"where a digest falls due, got one after {at}; take the next "
                f"{missing} one by one, with `.batch(state)`, or capture without "
                "digests."
            )
        return at


def _is_number(step: Any) -> bool:
    if step is None or isinstance(step, Tracer) or np.ndim(step):
        return False
    return not (isinstance(step, jax.Array) and step.is_deleted())
