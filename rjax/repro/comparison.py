"""What the comparison of two runs found."""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Literal

from rjax.digests import Tensor
from rjax.repro.bits import Bits, ulps
from rjax.repro.manifests import Causes
from rjax.repro.timeline import Timeline
from rjax.repro.tracks import Track

Verdict = Literal["bit-identical", "incomplete", "numerically equivalent", "diverged"]
Kind = Literal["shape", "dtype", "lacks", "note"]


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far apart runs may be that are still called numerically equivalent.

    Attributes:
        relative_scalars: bound on |a - b| / max(|a|, |b|) of every floating number of
            every step; the loss scale, integers and booleans must be equal.
        relative_tensors: bound on ||a - b|| / ||a|| of every floating tensor in the
            last snapshots that both runs have.

    Raises:
        ValueError: for what is no number from 0 up.

    Example:
        >>> Tolerance(relative_tensors=0.1).relative_scalars
        0.001
    """

    relative_scalars: float = 1e-3
    relative_tensors: float = 1e-2

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, numbers.Real) or not 0 <= float(value) < math.inf:
                raise ValueError(
                    f"`{field.name}` must be a number >= 0, got {value!r}."
                )


@dataclasses.dataclass(frozen=True)
class Finding:
    """One way in which the records are built differently.

    Attributes:
        kind: "shape" or "dtype" where things of one name have another in each record,
            "lacks" where one has what the other has not, "note" for what decides
            nothing.
        text: one sentence.
    """

    kind: Kind
    text: str


@dataclasses.dataclass(frozen=True)
class ColumnDifference:
    """One column of the steps in which the runs differ.

    Attributes:
        step: number of the first step that differs.
        name: of the column, such as "loss" or "metrics/accuracy".
        a: its value at that step in the first run.
        b: the same in the second run.
        count: in how many steps it differs.
        largest: largest |a - b| / max(|a|, |b|) over all steps.
    """

    step: int
    name: str
    a: Bits
    b: Bits
    count: int
    largest: float

    @property
    def ulps(self) -> int | None:
        """Floats between the two values, `None` where that means nothing."""
        return ulps(self.a, self.b)


@dataclasses.dataclass(frozen=True)
class Element:
    """The first element of a tensor that differs.

    Attributes:
        flat: index in the flat tensor.
        index: index in the tensor's shape; that of a random key's words has one more
            entry than the tensor has axes.
        a: value in the first run.
        b: value in the second run.
        count: how many elements of the tensor differ.
        size: how many it has.
    """

    flat: int
    index: tuple[int, ...]
    a: Bits
    b: Bits
    count: int
    size: int

    @property
    def ulps(self) -> int | None:
        """Floats between the two values, `None` where that means nothing."""
        return ulps(self.a, self.b)


@dataclasses.dataclass(frozen=True)
class StateDifference:
    """The first digests of the state that differ.

    Attributes:
        step: after how many steps they were taken.
        equal: after how many steps the digests before them were taken, which are
            equal; `None` if there are none.
        tensors: those that differ, causes before effects: moments before the masters,
            those before their copies.
        compared: how many tensors were compared.
        a: digest of the first of `tensors` in the first run, in hex.
        b: the same in the second run.
        element: its first element that differs, if both have a snapshot there.
        hint: how to get it, or why it is not there, else.
    """

    step: int
    equal: int | None
    tensors: tuple[Tensor, ...]
    compared: int
    a: str
    b: str
    element: Element | None = None
    hint: str = ""

    @property
    def name(self) -> str:
        """Field and path of the first tensor that differs."""
        return self.tensors[0].name


@dataclasses.dataclass(frozen=True)
class GradientDifference:
    """The first digests of gradients that differ.

    Attributes:
        step: number of the step whose gradient it is.
        equal: number of the last step before it whose gradient was compared, and is
            equal; `None` if there is none.
        tensors: the gradients that differ, in the order of the arena.
        compared: how many were compared.
        a: digest of the first of `tensors` in the first run, in hex.
        b: the same in the second run.
    """

    step: int
    equal: int | None
    tensors: tuple[Tensor, ...]
    compared: int
    a: str
    b: str

    @property
    def name(self) -> str:
        """Of the first gradient that differs: "gradient of conv1/kernel"."""
        return self.tensors[0].name


Difference = ColumnDifference | StateDifference | GradientDifference


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far one region lies apart in two snapshots.

    Attributes:
        region: name of the region, or of the state's field outside all regions.
        tensor: name of its tensor that lies furthest apart.
        relative: ||a - b|| / ||a|| of that tensor.
    """

    region: str
    tensor: str
    relative: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What :func:`rjax.repro.compare` found; print it, or let a notebook show it.

    The verdict is one of

    * "bit-identical": both runs took the same steps, every recorded word of every step
      and every digest that both have is equal, and so are tensors, shapes and dtypes;
      digests of gradients count where both have them;
    * "incomplete": nothing differs, but not all could be compared: one record is
      shorter or lacks tensors, columns or steps, or no digests are in common;
    * "numerically equivalent": something differs, all of it within the tolerance;
    * "diverged": all else.

    Attributes:
        verdict: as above.
        reason: what it rests on, one sentence.
        first: where the runs differ first; the state after n steps comes before the
            numbers of step n, and its loss before its gradient, and that before the
            state after it.
        state: the first digests of the state that differ.
        gradients: the first digests of gradients that differ.
        columns: the columns that differ, the earliest first.
        findings: how the records are built differently.
        a: course of the first run.
        b: course of the second run.
        compared: number of steps, and of rows of digests of the state, that were
            compared.
        equal: after how many steps the last digests were taken up to which all are
            equal; `None` without any.
        distances: of every region in the last snapshots in common, with the number of
            steps before those; empty if nothing differs or there are none.
        causes: differences of the manifests, the likeliest first.
        timelines: where they agree, by "steps" (the numbers of each step), "state" and,
            where both have them, "gradients".

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, rjax
        >>> params, folder = {"w": jnp.ones((4, 2))}, tempfile.mkdtemp()
        >>> plan = rjax.make_plan(params, rjax.Config(learning_rate=0.1))
        >>> loss = lambda p, x: jnp.mean((x @ p["w"]).astype(jnp.float32))
        >>> step = jax.jit(rjax.make_train_step(rjax.stateless_loss(loss), plan))
        >>> state = rjax.init_state(plan, params)
        >>> with rjax.repro.record(folder, plan, state, every=1) as recording:
        ...     state, report = step(state, jnp.ones((8, 4), jnp.float16))
        ...     recording.add(state, report)
        >>> found = rjax.repro.compare(folder, folder)
        >>> found.verdict, found.compared
        ('bit-identical', (1, 2))
    """

    verdict: Verdict
    reason: str
    first: Difference | None
    state: StateDifference | None
    gradients: GradientDifference | None
    columns: tuple[ColumnDifference, ...]
    findings: tuple[Finding, ...]
    a: Track
    b: Track
    compared: tuple[int, int]
    equal: int | None
    distances: tuple[int, tuple[Distance, ...]] | None
    causes: Causes
    timelines: Mapping[str, Timeline]

    def text(self) -> str:
        """Return the comparison as lines: the verdict, where, likeliest causes."""
        from rjax.repro.telling import text

        return text(self)

    def to_html(self) -> str:
        """Return the comparison as a page that needs nothing from elsewhere."""
        from rjax.repro.page import page

        return page(self)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from rjax.repro.page import fragment

        return fragment(self)
