"""The static capture: from a step, or from a file, to a compiled program."""

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rjax.plan import Plan
from rjax.programs import meshes, saved
from rjax.programs.cache import enable_compilation_cache
from rjax.programs.captured import Captured
from rjax.programs.signature import Signature, leaves_of
from rjax.step import find_plan

_STRUCTURE = (
    "`step` must return a state like the one it was given, so that it can be called "
    "again; {}."
)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A step that JAX has traced for a state and a batch, to be compiled.

    Attributes:
        name: of the step function.
        signature: the arrays it takes.
        lowered: the program, as `jax.jit(...).lower` gives it.
        state_tree: structure of the state.
        batch_tree: structure of the batch.
        plan: the static layout, if it is known.
        export: returns the program for other processes, which takes another trace.
    """

    name: str
    signature: Signature
    lowered: jax.stages.Lowered
    state_tree: Any
    batch_tree: Any
    plan: Plan | None
    export: Callable[[], jax.export.Exported]

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Captured:
        """Compile the program; see :func:`capture`."""
        started = time.perf_counter()
        options = dict(compiler_options) if compiler_options else None
        compiled = self.lowered.compile(compiler_options=options)
        return Captured(
            self.name,
            self.signature,
            compiled,
            self.plan,
            export=self.export,
            results=jax.tree.leaves(self.lowered.out_info[1]),
            trees=(self.state_tree, self.batch_tree),
            compile_seconds=time.perf_counter() - started,
        )


def trace(step: Any, state: Any, batch: Any, plan: Plan | None = None) -> Traced:
    """Trace a step for a state and a batch; see :func:`capture`."""
    signature = Signature(leaves_of("state", state), leaves_of("batch", batch))
    state_leaves, state_tree = jax.tree.flatten(state)
    batch_leaves, batch_tree = jax.tree.flatten(batch)

    def flat(state_leaves: Any, batch_leaves: Any) -> Any:
        state = state_tree.unflatten(state_leaves)
        returned = step(state, batch_tree.unflatten(batch_leaves))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise ValueError(
                "`step` must return a pair (state, report), got "
                f"{type(returned).__name__}."
            )
        leaves, tree = jax.tree.flatten(returned[0])
        if tree != state_tree:
            raise ValueError(_STRUCTURE.format(f"got {tree} for {state_tree}"))
        return leaves, returned[1]

    name = getattr(step, "__name__", "step")
    flat.__name__ = flat.__qualname__ = name
    jitted = jax.jit(flat, donate_argnums=0)
    arguments = jax.tree.map(_placed, (state_leaves, batch_leaves))
    lowered = jitted.lower(*arguments)
    returned = leaves_of("state", state_tree.unflatten(lowered.out_info[0]))
    for old, new in zip(signature.state, returned, strict=True):
        if old != new:
            raise ValueError(_STRUCTURE.format(f"`{old.name}` is {old}, then {new}"))
    return Traced(
        name,
        signature,
        lowered,
        state_tree,
        batch_tree,
        plan or find_plan(step),
        export=lambda: jax.export.export(jitted)(*arguments),
    )


def _placed(x: Any) -> Any:
    """Return what a program has to know of an argument: no data, and no number."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if isinstance(x, jax.Array):
        sharding = x.sharding if getattr(x, "committed", False) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    x = np.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))


def capture(
    step: Any,
    state: Any,
    batch: Any,
    *,
    plan: Plan | None = None,
    cache: bool | str | os.PathLike[str] = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Captured:
    """Compile a step ahead of time into one program that takes its state over.

    Equals ``jax.jit(step, donate_argnums=0).lower(state, batch).compile()`` and gives
    the same bits as the jitted step, but it never compiles again: what it was not
    compiled for it refuses in a sentence. Everything that moves from step to step (the
    loss scale, the learning rate, counters, the key) is an argument and never stale.

    Args:
        step: ``step(state, batch) -> (state, anything)``, from
            :func:`rjax.make_train_step` or around it, jitted or not.
        state: a state, or its shapes as `jax.ShapeDtypeStruct`; it is not given away
            here.
        batch: a batch, or its shapes.
        plan: the static layout, for the stamp of a saved program; `None` takes that of
            `step`, if `step` is from `make_train_step`.
        cache: keep compiled programs on disk and look for this one there: `True`, or a
            folder; see :func:`rjax.enable_compilation_cache`, which it calls.
        compiler_options: options of XLA for this program alone, such as
            ``{"xla_gpu_autotune_level": 0}``.

    Returns:
        The program, to be called like the step.

    Raises:
        ValueError: for leaves that are no arrays, a step that does not return a state
            like the one it takes, or a cache that cannot be.

    Example:
        >>> import jax.numpy as jnp, rjax
        >>> params = {"w": jnp.array([[8.0]])}
        >>> plan = rjax.make_plan(params, rjax.Config(optimizer=rjax.optim.sgd()))
        >>> loss_fn = rjax.stateless_loss(lambda p, batch: jnp.sum(p["w"]))
        >>> state = rjax.init_state(plan, params)
        >>> step = rjax.capture(rjax.make_train_step(loss_fn, plan), state, {})
        >>> state, report = step(state, {})
        >>> state, report = step(state.replace(learning_rate=1.0), {})
        >>> rjax.get_params(plan, state)["w"].item()
        6.900000095367432

    Source: static capture of the article, section 5; `jax.stages` of JAX.
    """
    if cache:
        enable_compilation_cache(None if cache is True else cache)
    return trace(step, state, batch, plan).compile(compiler_options)


def load_captured(
    path: str | os.PathLike[str],
    plan: Plan | None = None,
    *,
    cache: bool | str | os.PathLike[str] = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> Captured:
    """Load a program that `Captured.save` has kept, and compile it here.

    It gives the same bits as the program that was saved and takes its state over again.
    Loading runs nothing of the file but what XLA compiles: a program that would reach
    the host is refused, and nothing is unpickled.

    Args:
        path: the file.
        plan: the layout that the caller trains with, compared with that of the saved
            program in layout and configuration; `None` compares nothing, and then the
            arrays of the state decide when it is called.
        cache: keep the compiled program on disk, see :func:`capture`.
        compiler_options: options of XLA for this program alone.

    Returns:
        The program.

    Raises:
        ValueError: in a sentence, for a file that is damaged or none of these, and for
            other versions, another device, fewer devices, another plan or config than
            it was saved for.
        OSError: if the file cannot be read.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> loss_fn = rjax.stateless_loss(lambda p, x: jnp.float32(x @ p["w"]).mean())
        >>> state, x = rjax.init_state(plan, params), jnp.ones((3, 4), "float16")
        >>> import os, tempfile
        >>> step = rjax.capture(rjax.make_train_step(loss_fn, plan), state, x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "step.rjax")
        ...     saved = step.save(path)
        ...     step = rjax.load_captured(path, plan)
        >>> state, report = step(state, x)
        >>> float(report.loss)
        4.0

    Source: `jax.export` of JAX.
    """
    if cache:
        enable_compilation_cache(None if cache is True else cache)
    started = time.perf_counter()
    name, signature, stamp, exported = saved.read(Path(path), plan)
    run = jax.jit(exported.call, donate_argnums=0)
    shapes = exported.in_avals
    if stamp["mesh"] is not None:
        shapes = meshes.laid_out(Path(path), stamp["mesh"], exported)
    arguments = jax.tree.unflatten(exported.in_tree, shapes)[0]
    options = dict(compiler_options) if compiler_options else None
    compiled = run.lower(*arguments).compile(compiler_options=options)
    return Captured(
        name,
        signature,
        compiled,
        plan,
        stamp=stamp,
        export=lambda: exported,
        results=exported.out_avals[len(signature.state) :],
        trees=None,
        compile_seconds=time.perf_counter() - started,
    )
