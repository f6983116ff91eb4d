"""Record a run while it trains: each step's scalars, digests of the state now and then.

Reports and digests stay on the device until many can be fetched at once, so the loop
waits for nothing. What waits is written within about a second, or when the record is
closed; a run that is killed loses no more than that. The steps of a scan wait for the
next scan.
"""

import operator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from rjax.digests import digest, gradients, tensors
from rjax.files import AppendOnly
from rjax.plan import Plan
from rjax.report import Report
from rjax.repro import format as on_disk
from rjax.repro.columns import numbers
from rjax.repro.manifest import Manifest
from rjax.repro.reopened import Reopened
from rjax.repro.scanned import Scan
from rjax.repro.snapshots import save_snapshot
from rjax.repro.waiting import FETCH, Waiting
from rjax.state import RegionState

# One program for every record of a plan.
_jitted_digest = jax.jit(digest, static_argnums=0)


class Recording:
    """A record under way, as :func:`rjax.repro.record` begins it.

    Attributes:
        folder: where the files of the record lie.

    Example:
        >>> import tempfile, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config(learning_rate=0.1))
        >>> loss = lambda p, x: jnp.mean((x @ p["w"]).astype(jnp.float32))
        >>> step = jax.jit(rjax.make_train_step(rjax.stateless_loss(loss), plan))
        >>> state = rjax.init_state(plan, params)
        >>> recording = rjax.repro.record(tempfile.mkdtemp(), plan, state)
        >>> for _ in range(3):
        ...     state, report = step(state, jnp.ones((8, 4), jnp.float16))
        ...     recording.add(state, report)
        >>> recording.close()
        >>> sorted(path.name for path in recording.folder.iterdir())
        ['digests.bin', 'layout.json', 'steps.bin']
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        state: RegionState,
        every: int,
        snapshot_every: int,
        manifest: Manifest | None,
        going_on: Reopened | None = None,
    ) -> None:
        self.folder = folder
        self._plan, self._every, self._snapshot_every = plan, every, snapshot_every
        self._manifest = manifest
        # One of both is empty: before either takes something the other is written.
        self._waiting = Waiting()
        self._scan: Scan | None = None
        self._digests: list[tuple[int, jax.Array | np.ndarray]] = []
        self._step = self._first = int(state.step)
        self._layout: on_disk.Layout | None = None
        self._tensors = tensors(plan, state)
        if going_on is None:
            folder.mkdir()
        else:
            self._first, self._layout = going_on.first, going_on.layout
        self._keep = {} if going_on is None else going_on.keep
        self._steps_file = self._file(on_disk.STEPS)
        self._digests_file = self._file(on_disk.DIGESTS)
        self._gradients_file: AppendOnly | None = None
        if going_on is not None:
            if going_on.layout.gradients:
                self._gradients_file = self._file(on_disk.GRADIENTS)
            if every:
                # It is in the files. Other processes may begin their record here, and
                # of a state over several all have to ask for its digest.
                _jitted_digest(plan, state)
            return
        if every:
            self._digests.append((self._step, _jitted_digest(plan, state)))
        if snapshot_every:
            self._save(state)

    def add(self, state: RegionState, report: Report) -> None:
        """Take one step, without waiting for it.

        Call it before the state is given away to the next step. Where a scan waits to
        be written, the call waits for that.

        Args:
            state: after the step.
            report: of the step.
        """
        self.observe(state, report)
        self._waiting.add(report)
        if due := self._waiting.due():
            self.take(self._waiting.fetch(due))

    def add_scanned(
        self, state: RegionState, reports: Report, digests: jax.Array | None = None
    ) -> None:
        """Take the steps of a `lax.scan`; the record is that of a loop over `add`.

        This does not wait for them: they are written by the next call of any method,
        while the device is at the next scan. A run that is killed loses one scan at
        most. Only the state at the end can be kept: it is, if a turn of
        `snapshot_every` came in these steps, and this then waits and writes all.

        Args:
            state: after the last step, not yet given away; it may be once this returns.
            reports: of consecutive steps, stacked by the scan; never to be given away,
                nor are `digests`.
            digests: uint32[steps, tensors, 2], stacked by the scan, of the state after
                each step: :func:`rjax.repro.scanned_digest` with the `every` of this
                recording (or :func:`rjax.repro.digest`). Not needed with `every=0`.

        Raises:
            ValueError: at once, if shapes or dtypes are not those of such steps; from
                the call that writes them, if they are not the steps that come next, or
                `digests` are not theirs. Nothing of them is written then, and nothing
                taken by that call: the record can go on with the right ones.
            OSError: if there is no room; the record then ends before the steps that
                waited, or within them.

        Example:
            ::

                def body(state, batch):
                    state, report = step(state, batch)
                    digests = rjax.repro.scanned_digest(plan, state, every=10)
                    return state, (report, digests)

                @functools.partial(jax.jit, donate_argnums=0)
                def run_epoch(state, batches):
                    return jax.lax.scan(body, state, batches)

                with rjax.repro.record("runs/a", plan, state, every=10) as recording:
                    for batches in epochs:
                        state, (reports, digests) = run_epoch(state, batches)
                        recording.add_scanned(state, reports, digests)
        """
        self.flush()
        self._check_numbers(reports)
        tensors, every = len(self._tensors), self._every
        scan = Scan(state, reports, digests, self._step, tensors, every)
        self._begin(reports)
        self._scan, self._step = scan, scan.steps.stop
        kept = self._snapshot_every
        if kept and scan.steps.stop // kept > scan.steps.start // kept:
            self._write_scan()
            self._save(state)

    def observe(self, state: RegionState, report: Report) -> None:
        """Count a step, and digest and keep the state where its turn has come.

        One half of :meth:`add`, for loops that fetch their reports themselves.

        Args:
            state: after the step, not yet given away.
            report: of the step; only its shapes and dtypes are looked at.
        """
        self._write_scan()
        self._begin(report)
        self._step += 1
        if self._every and self._step % self._every == 0:
            self._digests.append((self._step, _jitted_digest(self._plan, state)))
        if self._snapshot_every and self._step % self._snapshot_every == 0:
            self._save(state)

    def take(self, reports: Report) -> None:
        """Write the rows of steps that have run; the other half of :meth:`add`.

        Args:
            reports: of consecutive steps, stacked, on the host.

        Raises:
            OSError: if there is no room; the record then ends before these steps.
        """
        assert self._layout is not None, "observe comes first"
        self._write_scan()
        values = [values for _, values in numbers(reports)]
        words = np.stack([on_disk.words_of(value) for value in values], axis=1)
        steps = reports.step.tolist()
        rows = on_disk.pack(self._layout.step_row, steps, words)
        of_gradients = self._packed_gradients(steps, reports.grad_digests)
        ready, digests = self._packed_digests(steps[-1] + 1)
        # All is at hand before the first byte is written: the files of a killed run end
        # together, but for a kill just between these lines.
        self._steps_file.append(rows)
        if self._gradients_file is not None:
            self._gradients_file.append(of_gradients)
        self._digests_file.append(digests)
        del self._digests[:ready]

    def flush(self) -> None:
        """Write all that waits; waits for the steps under way.

        Raises:
            ValueError: if a scan that waits is not of the steps that come next, as
                :meth:`add_scanned` says.
            OSError: if there is no room.
        """
        self._write_scan()
        while left := len(self._waiting):
            self.take(self._waiting.fetch(min(left, FETCH)))

    def close(self, status: str = "finished") -> None:
        """Write all that waits and close the files, which are closed in any case.

        Args:
            status: how the run ended, for the manifest that :func:`rjax.repro.record`
                wrote; "failed" there if not all could be written.

        Raises:
            ValueError: as `flush`.
            OSError: as `flush`.
        """
        try:
            self.flush()
        except BaseException:
            status = "failed"
            raise
        finally:
            self._end(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close("finished" if error is None else "failed")

    def _end(self, status: str) -> None:
        try:
            if self._manifest is not None:
                self._manifest.finish(status, {"steps": self._step})
        finally:
            files = self._digests_file, self._gradients_file, self._steps_file
            for file in files:
                if file is not None:
                    file.close()

    def _write_scan(self) -> None:
        """Write the scan that waits, if one does, unless it is not what comes next."""
        if self._scan is None:
            return
        steps = self._scan.steps
        try:
            reports, digests = self._scan.fetch()
        except Exception:
            self._scan, self._step = None, steps.start
            raise
        self._scan = None
        self._digests += digests
        for start in range(0, len(steps), FETCH):
            part = slice(start, start + FETCH)
            self.take(jax.tree.map(operator.itemgetter(part), reports))

    def _save(self, state: RegionState) -> None:
        path = on_disk.snapshot_path(self.folder, self._step)
        save_snapshot(path, self._plan, state)

    def _file(self, name: str) -> AppendOnly:
        return AppendOnly(self.folder / name, self._keep.get(name))

    def _begin(self, report: Report) -> None:
        """Write the layout, unless it is there."""
        if self._layout is None:
            self._layout = self._described(report)
            if self._layout.gradients:
                self._gradients_file = self._file(on_disk.GRADIENTS)
            on_disk.write_layout(self.folder, self._layout)
        elif self._keep:
            self._keep = {}  # of a record that goes on, the first report tells
            self._check_numbers(report)

    def _check_numbers(self, report: Report) -> None:
        if self._layout not in (None, self._described(report)):
            raise ValueError(
                "`reports` must hold the numbers of those recorded before them; give "
                "every kind of step a record of its own."
            )

    def _described(self, report: Report) -> on_disk.Layout:
        columns = tuple((name, str(value.dtype)) for name, value in numbers(report))
        digested = self._every and report.grad_digests is not None
        found = gradients(self._plan) if digested else ()
        plan = self._plan.fingerprint
        return on_disk.Layout(columns, self._tensors, self._every, plan, found)

    def _packed_gradients(self, steps: list[int], digests: Any) -> bytes:
        """Return the digests of gradients of steps before which the state has one."""
        assert self._layout is not None
        if self._gradients_file is None:
            return b""
        due = [
            i
            for i, step in enumerate(steps)
            if step == self._first or step % self._every == 0
        ]
        if not due:
            return b""
        row, numbers = self._layout.gradient_row, [steps[i] for i in due]
        return on_disk.pack(row, numbers, digests[due])

    def _packed_digests(self, step: int) -> tuple[int, bytes]:
        """Return how many states of at most that many steps wait, and their digests."""
        assert self._layout is not None
        ready = [pair for pair in self._digests if pair[0] <= step]
        if not ready:
            return 0, b""
        lanes = jax.device_get([lanes for _, lanes in ready])
        row, steps = self._layout.digest_row, [step for step, _ in ready]
        return len(ready), on_disk.pack(row, steps, np.stack(lanes))
