"""A step as one compiled program, with manners."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from jax.core import Tracer

from rjax import displays
from rjax.plan import Plan
from rjax.programs import hlo, meshes, saved, static, tables
from rjax.programs.signature import Signature

_TRACED = (
    "`{}` is a compiled program, which cannot be traced again; inside jit, scan, vmap "
    "or grad call the step that was captured."
)


class Captured:
    """A step as one compiled program; made by `capture` and `load_captured`.

    Call it like the step: ``state, report = captured(state, batch)``. The state is
    given away to the call.

    Attributes:
        name: of the step function.
        signature: the arrays it takes: `.state` and `.batch`, each with name, shape and
            dtype.
        plan: the static layout, `None` where it is not known.
        compile_seconds: how long XLA took, or the cache.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> loss_fn = rjax.stateless_loss(lambda p, x: jnp.float32(x @ p["w"]).mean())
        >>> state, x = rjax.init_state(plan, params), jnp.ones((3, 4), "float16")
        >>> step = rjax.capture(rjax.make_train_step(loss_fn, plan), state, x)
        >>> state, report = step(state, x)
        >>> float(report.loss)
        4.0
    """

    def __init__(
        self,
        name: str,
        signature: Signature,
        compiled: jax.stages.Compiled,
        plan: Plan | None,
        *,
        export: Callable[[], jax.export.Exported],
        results: Sequence[Any],
        trees: tuple[Any, Any] | None,
        compile_seconds: float,
        stamp: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.signature = signature
        self.plan = plan
        self.compile_seconds = compile_seconds
        self._compiled = compiled
        self._export = export
        self._results = results
        self._trees = trees
        self._stamp = stamp

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Run the program.

        Args:
            state: as `signature.state` says; given away.
            batch: as `signature.batch` says.

        Returns:
            The new state and what the step returns beside it.

        Raises:
            ValueError: for anything that it was not compiled for, or a state that was
                given away before.
        """
        state_leaves, state_tree = jax.tree.flatten(state)
        batch_leaves, batch_tree = jax.tree.flatten(batch)
        if self._trees != (state_tree, batch_tree):
            self._learn(state, batch, state_tree, batch_tree)
        try:
            new, rest = self._compiled(state_leaves, batch_leaves)
        except (TypeError, ValueError, RuntimeError) as error:
            self._explain(state, batch, error)
            raise
        return state_tree.unflatten(new), rest

    def _learn(self, state: Any, batch: Any, *trees: Any) -> None:
        """Refuse a structure it was not compiled for; take the first that fits."""
        self._check(state, batch)
        if self._trees is not None:
            old = self._trees
            name, i = ("state", 0) if old[0] != trees[0] else ("batch", 1)
            raise ValueError(
                f"`{name}` is {trees[i]}, the program was compiled for {old[i]}; pass "
                "that, or capture the step again."
            )
        self._trees = trees

    def _explain(self, state: Any, batch: Any, error: Exception) -> None:
        """Raise a sentence for what the program was not made for, if it is that."""
        text = str(error)
        early = isinstance(error, TypeError | ValueError)
        if early or "deleted" in text or "donate" in text:
            try:
                self._check(state, batch)
            except ValueError as refusal:
                raise refusal from None
            self._check_devices((state, batch))

    def _check(self, state: Any, batch: Any) -> None:
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((state, batch))):
            raise ValueError(_TRACED.format(self.name))
        self.signature.check(state, batch)

    def _check_devices(self, arguments: Any) -> None:
        """Refuse arrays that were put elsewhere than the program was compiled for."""
        leaves = (*self.signature.state, *self.signature.batch)
        arrays, wanted = map(jax.tree.leaves, (arguments, self._input_shardings()))
        for leaf, x, there in zip(leaves, arrays, wanted, strict=True):
            if not getattr(x, "committed", False):
                continue
            if not x.sharding.is_equivalent_to(there, x.ndim):
                raise ValueError(
                    f"`{leaf.name}` lies on {_where(x.sharding)}, the program was "
                    f"compiled for {_where(there)}; move it with `jax.device_put`, or "
                    "capture the step for arguments that lie there."
                )

    def _input_shardings(self) -> Any:
        return self._compiled.input_shardings[0]

    def _devices(self) -> set[Any]:
        shardings = jax.tree.leaves(self._input_shardings())
        return {device for sharding in shardings for device in sharding.device_set}

    def _device_kind(self) -> str:
        return min(self._devices(), key=lambda device: device.id).device_kind

    def stages(self) -> tables.StageTable:
        """Return the kernels that a call runs and what they move, by stage.

        Stages that share a kernel have a row together.
        """
        return tables.stage_table(hlo.parse(self.hlo()))

    def memory(self) -> tables.MemoryTable:
        """Return the bytes that a call needs: state by arena, batch, XLA's own."""
        fields: dict[str, int] = {}
        state, batch = self._compiled.in_avals[0]
        for leaf, aval in zip(self.signature.state, state, strict=True):
            field = leaf.name.removeprefix("state").lstrip(".").split(".")[0]
            field = field.split("[")[0] or "state"
            fields[field] = fields.get(field, 0) + _nbytes(aval)
        stats: Any = self._compiled.memory_analysis()
        return tables.MemoryTable(
            state=fields,
            batch=sum(map(_nbytes, batch)),
            report=sum(map(_nbytes, self._results)),
            temporaries=stats.temp_size_in_bytes,
            code=stats.generated_code_size_in_bytes,
        )

    def cost(self) -> dict[str, float]:
        """Return XLA's count of a call's work: `flops` and `bytes accessed`.

        An estimate: the branches of a conditional and the trips of a loop are counted
        as XLA does, and library calls may be left out.
        """
        found: Any = self._compiled.cost_analysis()
        return {key: found[key] for key in ("flops", "bytes accessed") if key in found}

    def hlo(self, stage: Literal["optimized", "lowered"] = "optimized") -> str:
        """Return the text of the program: as XLA runs it, or as JAX has lowered it."""
        if stage == "lowered":
            return self._export().mlir_module()
        return self._compiled.as_text() or ""

    def assert_static(self) -> None:
        """Prove that a call asks the host for nothing: no callback and no transfer.

        That is: none of the program's instructions does. Of a conditional, XLA's
        runtime on a GPU may read the predicate all the same, where it has not recorded
        it into a command buffer; :meth:`hlo` shows whether there is a conditional.

        Raises:
            AssertionError: with the first instruction that does, and where it came
                from; a `ValueError` at once.
        """
        static.check(self.hlo(), f"`{self.name}`")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Keep the program in a file, for :func:`rjax.load_captured`.

        The file holds the program as StableHLO, stamped with versions, device, plan and
        config; nothing is pickled. XLA compiles it again when it is loaded, with the
        compiler options given there. A program over the devices of a mesh is loaded
        for as many, the first that there are.

        Args:
            path: the file; one that is there is replaced in one go.

        Returns:
            The path.

        Raises:
            ValueError: for a program that reaches the host, or results of a type that
                was not registered with `jax.export`.
            NotImplementedError: for a program over the devices of several processes,
                or over several devices without a mesh.
            OSError: as the file system says; what lay there before stays.
        """
        mesh = meshes.described(self.name, jax.tree.leaves(self._input_shardings()))
        self.assert_static()  # jax.export would refuse a callback, but not say where
        stamp = self._stamp or {**saved.make_stamp(self.plan), "mesh": mesh}
        return saved.write(Path(path), self.name, self.signature, stamp, self._export())

    def __repr__(self) -> str:
        return displays.text(type(self).__name__, self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        plan = [("plan", self.plan.fingerprint[:12])] if self.plan else []
        return [
            ("name", self.name),
            ("state", displays.count(len(self.signature.state), "array")),
            ("batch", displays.count(len(self.signature.batch), "array")),
            ("device", self._device_kind()),
            *plan,
        ]

    def _summary(self) -> str:
        compiled = f"compiled in {self.compile_seconds:.1f} s"
        return f"{self.name}, {compiled} for {self._device_kind()}"

    def _repr_html_(self) -> str:
        stages, memory = self.stages(), self.memory()
        return displays.headed(
            "program",
            self._summary(),
            displays.folded(f"stages: {stages.summary}", stages.table()),
            displays.folded(f"memory: {memory.summary}", memory.table()),
        )


def _where(sharding: Any) -> str:
    """Return the devices of a sharding, and how it lies on several."""
    devices = ", ".join(map(str, sorted(sharding.device_set, key=lambda d: d.id)))
    spec = getattr(sharding, "spec", None)
    return f"{devices} as {spec}" if len(sharding.device_set) > 1 else devices


def _nbytes(aval: Any) -> int:
    dtype = aval.dtype
    if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, aval).size * 4
    return aval.size * dtype.itemsize
