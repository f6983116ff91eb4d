"""A whole epoch as one compiled program, over data that stay on the device."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rjax.data import steps_per_epoch
from rjax.digests import digest
from rjax.plan import Plan
from rjax.programs.cache import enable_compilation_cache
from rjax.programs.captured_epoch import CapturedEpoch
from rjax.programs.epoch_report import EpochReport, summarize
from rjax.programs.packing import pack, unpack
from rjax.programs.sampling import Augment, Sampling, nearest_divisor
from rjax.programs.signature import leaves_of
from rjax.programs.tracing import trace
from rjax.report import Report
from rjax.state import RegionState
from rjax.step import find_plan


@dataclasses.dataclass(frozen=True, eq=False)
class _Epoch:
    """The function that is compiled: ``(state, data) -> (state, EpochReport)``.

    Attributes:
        step: the train step.
        sampling: which examples it gets.
        plan: the static layout; not needed where `every` is 0.
        epochs: how many there are, `None` for one whose report has no axis for it.
        every: steps from one digest to the next, which divides those of an epoch; 0 for
            none.
        reports: whether to keep the report of every step.
    """

    step: Callable[[RegionState, Any], tuple[RegionState, Report]]
    sampling: Sampling
    plan: Plan | None
    epochs: int | None
    every: int
    reports: bool

    @property
    def __name__(self) -> str:
        return f"epoch_of_{getattr(self.step, '__name__', 'step')}"

    def __call__(self, state: RegionState, data: Any) -> tuple[RegionState, Any]:
        if self.epochs is None:
            return self._one(state, data)
        state, report = lax.scan(
            lambda state, _: self._one(state, data), state, length=self.epochs
        )
        kept = jax.tree.map(_joined, (report.reports, report.digests))
        return state, dataclasses.replace(report, reports=kept[0], digests=kept[1])

    def _one(self, state: RegionState, data: Any) -> tuple[RegionState, EpochReport]:
        sampling = self.sampling
        of_one: list[Report] = []  # its shapes, once the step has been traced

        def step(state: RegionState, batch: Any) -> Any:
            state, report = self.step(state, batch)
            of_one.append(jax.tree.map(_shape, report))
            return state, pack(report)

        def taken(state: RegionState, rows: jax.Array) -> Any:
            return step(state, sampling.take(data, rows, state.key, state.step))

        def block(state: RegionState, rows: jax.Array) -> Any:
            batches = sampling.block(data, rows, state.key, state.step)
            return self._steps(step, state, batches)

        rows = sampling.rows(state.key, state.step)
        if sampling.ahead == 1:
            state, (packed, last) = self._steps(taken, state, rows)
        else:
            state, found = lax.scan(block, state, _split(rows, sampling.ahead))
            packed, last = jax.tree.map(_joined, found)
        reports = unpack(packed, of_one[0])
        kept = reports if self.reports else None
        digests = None if last is None else self._spread(last)
        report = summarize(reports)
        return state, dataclasses.replace(report, reports=kept, digests=digests)

    def _steps(self, step: Any, state: RegionState, inputs: Any) -> Any:
        """Scan steps; return the state, their packed reports, and digests or `None`.

        With digests, in blocks that have one at their end. No step has to ask whether
        one is due: on a GPU a `lax.cond` in the body of a scan makes the device wait
        for the host.
        """
        plan, every = self.plan, self.every
        if not every:
            state, packed = lax.scan(step, state, inputs)
            return state, (packed, None)
        assert plan is not None, "capture_epoch asks for it"

        def block(state: RegionState, inputs: Any) -> Any:
            state, packed = lax.scan(step, state, inputs)
            # As in `scanned_digest`: of the state that goes on, not of one computed
            # once more.
            return state, (packed, digest(plan, lax.optimization_barrier(state)))

        blocks = jax.tree.map(lambda x: _split(x, every), inputs)
        state, (packed, last) = lax.scan(block, state, blocks)
        return state, (jax.tree.map(_joined, packed), last)

    def _spread(self, last: jax.Array) -> jax.Array:
        """Return digests with a row for every step, zeros where none is due."""
        shape = (last.shape[0], self.every, *last.shape[1:])
        return _joined(jnp.zeros(shape, last.dtype).at[:, -1].set(last))


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _split(x: jax.Array, length: int) -> jax.Array:
    """Return an array with its first axis in parts of a length."""
    return x.reshape(x.shape[0] // length, length, *x.shape[1:])


def _joined(x: jax.Array) -> jax.Array:
    """Return an array with its first two axes as one."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def capture_epoch(
    step: Any,
    state: Any,
    data: Any,
    batch_size: int,
    *,
    epochs: int | None = None,
    shuffle: bool = True,
    augment: Augment | None = None,
    ahead: int = 1,
    reports: bool = False,
    every: int = 0,
    plan: Plan | None = None,
    cache: bool | str | os.PathLike[str] = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> CapturedEpoch:
    """Compile a whole epoch ahead of time: shuffle, batches and steps in one program.

    Equals a loop over the jitted step, bit for bit, with the batches that
    :meth:`CapturedEpoch.batch` gives; but the host has nothing to do between the steps,
    and nothing ever compiles again. An epoch has ``n // batch_size`` steps of full
    batches; the examples that are left over are dropped, others in each epoch if they
    are shuffled.

    Everything random is a function of `state.key` and `state.step`, so there is nothing
    else to save: step i belongs to epoch ``i // steps``, shuffled by
    ``jax.random.permutation`` of a key that the state's key and the number of the epoch
    make, and its augmentation has a key of its own. A run that goes on from a
    checkpoint goes through the same examples as one that never stopped; from within an
    epoch a call takes the steps that are left of it, and then the first of the next.
    (The order is another one than that of `rjax.data`, which NumPy makes on the host.)

    Args:
        step: ``step(state, batch) -> (state, report)``, from
            :func:`rjax.make_train_step` or around it, jitted or not.
        state: a state, or its shapes; it is not given away here.
        data: pytree of arrays `[n, ...]`, NumPy's or JAX's, as a rule the pair
            `(images, labels)`, put on the device once; or its shapes, and then every
            call is given the data. Dtypes are kept, 64 bits become 32 as JAX has it.
        batch_size: examples a step.
        epochs: how many a call trains for, as one call each would; what the report
            holds then has a first axis of that length, only `reports` and `digests`
            keep one row a step, of all of them. `None` is one epoch, without that axis.
        shuffle: give each epoch an order of its own, else that of the data.
        augment: ``augment(key, images) -> images`` before each step, such as one of
            `rjax.data.augment`; the images are the first entry where `data` is a tuple
            or a list, and otherwise it is given the whole batch. The key is another one
            in each step.
        ahead: steps whose batches are made at once, under `jax.vmap`: on a GPU, kernels
            for many small batches take hardly longer than for one. They lie in memory
            together. It must divide the steps of an epoch and be a multiple of `every`.
        reports: keep the reports of all steps, stacked, as `report.reports`.
        every: the `every` of a recording: keeps the reports, and a digest of the state
            after every k-th step as `report.digests`, for
            :meth:`rjax.repro.Recording.add_scanned`. It must divide the steps of an
            epoch, and a call starts after a multiple of it. 0 for none.
        plan: the static layout; `None` takes that of `step`, if it is from
            `make_train_step`.
        cache: keep compiled programs on disk, see :func:`rjax.capture`.
        compiler_options: options of XLA for this program alone.

    Returns:
        The program: ``state, report = epoch(state)``, an :class:`rjax.EpochReport`.

    Raises:
        ValueError: for data that are no arrays of one length, sizes that do not fit, a
            step that does not return a state like the one it takes and a report, or a
            cache that cannot be.

    Example:
        >>> import jax.numpy as jnp, rjax
        >>> params = {"w": jnp.zeros((1, 1))}
        >>> plan = rjax.make_plan(params, rjax.Config(learning_rate=0.1))
        >>> def loss(params, batch):
        ...     x, y = batch
        ...     return jnp.mean((rjax.ops.dense(x, params["w"]) - y) ** 2)
        >>> step = rjax.make_train_step(rjax.stateless_loss(loss), plan)
        >>> x = jnp.linspace(-1, 1, 20, dtype=jnp.float16)[:, None]
        >>> state = rjax.init_state(plan, params)
        >>> epoch = rjax.capture_epoch(step, state, (x, 2 * x), batch_size=5, epochs=10)
        >>> state, report = epoch(state)
        >>> rjax.check(report, plan, state)
        >>> report.loss.shape, bool(report.loss[-1] < report.loss[0] / 100)
        ((10,), True)

        With a record::

            epoch = rjax.capture_epoch(step, state, data, 200, every=10)
            with rjax.repro.record("runs/a", plan, state, every=10) as recording:
                for _ in range(50):
                    state, report = epoch(state)
                    recording.add_scanned(state, report.reports, report.digests)

    Source: `lax.scan` of JAX; static capture of the article, section 5.
    """
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("epochs", 1 if epochs is None else epochs, 1),
        ("ahead", ahead, 1),
        ("every", every, 0),
    ):
        _check_whole(name, value, least)
    sampling = Sampling(_examples(data), batch_size, shuffle, augment, ahead)
    steps_per_epoch(sampling.examples, batch_size)  # refuses a batch of more than all
    plan = plan or find_plan(step)
    if every:
        _check_every(every, sampling.steps, plan)
    _check_ahead(ahead, sampling.steps, every or 1)
    # Traced once, for the check and for the program.
    inlined = jax.jit(step, inline=True)
    epoch = _Epoch(inlined, sampling, plan, epochs, every, reports or every > 0)
    _check_step(epoch, state, data)
    if cache:
        enable_compilation_cache(None if cache is True else cache)
    program = trace(epoch, state, data, plan).compile(compiler_options)
    return CapturedEpoch(program, sampling, data, epochs=epochs or 1, every=every)


def _check_whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"`{name}` must be a whole number >= {least}, got {value!r}.")


def _examples(data: Any) -> int:
    """Return how many examples there are, the same of every array."""
    leaves = leaves_of("data", data)
    if not leaves:
        raise ValueError("`data` must hold arrays, got none; pass (images, labels).")
    for leaf in leaves:
        if not leaf.shape:
            raise ValueError(
                f"`{leaf.name}` must have one row per example, got {leaf}; stack the "
                "examples to one array."
            )
        if leaf.shape[0] != leaves[0].shape[0]:
            raise ValueError(
                f"`{leaf.name}` has {leaf.shape[0]} rows, `{leaves[0].name}` has "
                f"{leaves[0].shape[0]}; every array needs one row per example."
            )
    return leaves[0].shape[0]


def _check_every(every: int, steps: int, plan: Plan | None) -> None:
    if plan is None:
        raise ValueError(
            "`plan` must be given for digests, as `step` does not know its own; pass "
            "the one that it was made with."
        )
    if steps % every:
        raise ValueError(
            f"`every` must divide the {steps} steps of an epoch, so that digests fall "
            f"due at the same steps of each, got {every}; take "
            f"{nearest_divisor(steps, every)}, here and for the recording."
        )


def _check_ahead(ahead: int, steps: int, every: int) -> None:
    if ahead > 1 and (steps % ahead or ahead % every):
        also = f" and be a multiple of every={every}" if every > 1 else ""
        raise ValueError(
            f"`ahead` must divide the {steps} steps of an epoch{also}, got {ahead}; "
            f"take {nearest_divisor(steps, ahead, of=every)}, or 1."
        )


def _check_step(epoch: _Epoch, state: Any, data: Any) -> None:
    """Refuse what cannot be scanned, in fewer words than a scan has."""
    if not isinstance(state, RegionState):
        raise ValueError(
            "`state` must be one from `rjax.init_state`, whose key and count of steps "
            f"choose the batches, got {type(state).__name__}."
        )

    def first(state: RegionState, data: Any) -> Any:
        return epoch.step(state, epoch.sampling.batch(data, state.key, state.step))

    returned = jax.eval_shape(first, state, data)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ValueError(
            f"`step` must return a pair (state, report), got {type(returned).__name__}."
        )
    new, report = returned
    if not isinstance(report, Report):
        raise ValueError(
            "`step` must return the report of one step beside the state, got "
            f"{type(report).__name__}; capture a step from `rjax.make_train_step`."
        )
    old, now = ({x.name: x for x in leaves_of("state", s)} for s in (state, new))
    for name in old | now:
        if old.get(name) != now.get(name):
            raise ValueError(
                "`step` must return a state like the one it was given, so that another "
                f"step can follow; `{name}` is {old.get(name)}, then {now.get(name)}."
            )
