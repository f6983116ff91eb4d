"""Models whose gradients are known beforehand, and rigs that run them.

The *pulled* model has the loss `sum(view * g)`: its gradient is the batch. Scaled
by the loss scale, the gradient of a kernel then passes through half precision, that
of a bias does not.
"""

import dataclasses
import functools
import hashlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rjax
from rjax.trees import flatten

MODES = ("jit", "eager")
PRECISIONS = ("fp16", "bf16", "fp32")
BAD = (np.nan, np.inf, -np.inf)

Shapes = tuple[tuple[str, tuple[int, ...]], ...]

# One parameter with a half-precision copy and one without.
BOTH: Shapes = (("kernel", (3, 1)), ("bias", (3,)))
# Every region, first and last with one slot or two. 120 elements leave a slot the
# least padding, 121 take the next row; `gain` is a scalar.
SIX: Shapes = (
    ("bn1/bias", (1,)),
    ("bn1/scale", (121,)),
    ("gain", ()),
    ("fc/bias", (3,)),
    ("fc/kernel", (2, 3)),
    ("conv1/kernel", (2, 2, 1, 3)),
    ("conv2/kernel", (1, 1, 5, 24)),
    ("conv10/kernel", (1, 1, 8, 2)),
)

# What a skipped step may change; everything else keeps its bits.
MOVES_ON_A_SKIP = frozenset(
    {"scale", "scaling_state", "step", "skipped", "consecutive_skips"}
)


@dataclasses.dataclass(frozen=True, eq=False)
class Rig:
    """A model with its plan and its train step, eager and jitted with donation."""

    plan: rjax.Plan
    params: Any
    batch_stats: Any
    eager: Callable[[rjax.RegionState, Any], Any]
    jitted: Callable[[rjax.RegionState, Any], Any]

    def state(self, values: dict[str, Any] | None = None, **changes: Any) -> Any:
        """Return a fresh state; `values` replaces parameters by path."""
        params = self.params
        if values is not None:
            found, treedef = flatten(params)
            leaves = [
                jnp.full(np.shape(leaf), values[path], jnp.float32)
                if path in values
                else leaf
                for path, leaf in found
            ]
            params = jax.tree.unflatten(treedef, leaves)
        state = rjax.init_state(self.plan, params, self.batch_stats)
        return state.replace(**changes)

    def run(
        self, state: rjax.RegionState, batches: Iterable[Any], mode: str = "jit"
    ) -> tuple[rjax.RegionState, list[rjax.Report]]:
        """Take one step a batch; return the last state and every report."""
        step = self.jitted if mode == "jit" else self.eager
        reports = []
        for batch in batches:
            state, report = step(state, batch)
            reports.append(report)
        return state, reports

    @functools.cached_property
    def scan(self) -> Callable[[rjax.RegionState, Any], Any]:
        """Steps over stacked batches in one program: (state, stacked reports)."""

        def many(state: rjax.RegionState, batches: Any) -> Any:
            return lax.scan(self.eager, state, batches)

        return jax.jit(many, donate_argnums=0)

    def repeat(self, state: rjax.RegionState, batch: Any, times: int) -> Any:
        """Take the same step many times in one program."""
        batches = jax.tree.map(
            lambda x: jnp.broadcast_to(jnp.asarray(x), (times, *jnp.shape(x))), batch
        )
        return self.scan(state, batches)

    def get(
        self, state: rjax.RegionState, path: str, which: str = "master"
    ) -> np.ndarray:
        """Return one trained parameter as a flat array, cut from its arena."""
        [slot] = [slot for slot in self.plan.slots if slot.path == path]
        wide = "ema" if which.startswith("ema") else "master"
        copied = which.endswith("compute") and state.compute is not None and slot.half
        arena = np.asarray(getattr(state, which if copied else wide))
        start = slot.offset - (self.plan.bias_like if copied else 0)
        return arena[start : start + slot.size]

    def both(self, state: rjax.RegionState, which: str = "master") -> np.ndarray:
        """Return the weights of a model of shapes `BOTH`, [2, 3]: kernel, bias."""
        return np.stack([self.get(state, path, which) for path in ("kernel", "bias")])


def pulled(params: Any, batch: Any) -> jax.Array:
    """Return `sum(view * g)`; `batch` has one gradient by path."""
    return sum(
        (jnp.sum(leaf.astype(jnp.float32) * batch[path])
         for path, leaf in flatten(params)[0]),
        start=jnp.zeros((), jnp.float32),
    )  # fmt: skip


def nested(leaves: dict[str, Any]) -> Any:
    """Return the tree of {path: leaf}."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *modules, name = path.split("/")
        inner = functools.reduce(lambda t, m: t.setdefault(m, {}), modules, tree)
        inner[name] = leaf
    return tree


@functools.cache
def make_rig(
    shapes: Shapes,
    config: rjax.Config,
    loss_fn: Any = None,
    rule: Any = None,
    stats: tuple[tuple[str, tuple[int, ...], float], ...] = (),
) -> Rig:
    """Return the rig of a model; the same arguments give the same compiled step.

    Parameters start at one, running statistics at the third entry of `stats`.
    """
    params = nested({path: jnp.ones(shape) for path, shape in shapes})
    loss_fn = rjax.stateless_loss(pulled) if loss_fn is None else loss_fn
    batch_stats = nested({path: jnp.full(shape, x) for path, shape, x in stats})
    plan = rjax.make_plan(params, config, batch_stats, rule)
    step = rjax.make_train_step(loss_fn, plan)
    return Rig(plan, params, batch_stats, step, jax.jit(step, donate_argnums=0))


def config(**options: Any) -> rjax.Config:
    """Return a config whose defaults are plain SGD, rate 0.1, a halving scale."""
    defaults = {
        "optimizer": rjax.optim.sgd(),
        "learning_rate": 0.1,
        "scaling": rjax.scaling.halving(),
    }
    return rjax.Config(**{**defaults, **options})


def both(*g: float, kernel: bool = True, bias: bool = True) -> dict[str, Any]:
    """Return the batch that pulls kernel and bias of `BOTH` by one number or three."""
    wide = np.broadcast_to(np.asarray(g, np.float32), 3)
    zero = np.zeros(3, np.float32)
    return {
        "kernel": (wide if kernel else zero).reshape(3, 1),
        "bias": wide if bias else zero,
    }


def ones(shapes: Shapes, g: float = 1.0) -> dict[str, Any]:
    """Return host gradients of one value for a model."""
    return {path: np.full(shape, g, np.float32) for path, shape in shapes}


def injected(batch: dict[str, Any], path: str, index: int, value: float) -> Any:
    """Return the batch with one element replaced."""
    leaf = batch[path].copy()
    leaf.reshape(-1)[index] = value
    return {**batch, path: leaf}


def host(x: Any) -> np.ndarray:
    """Return an array on the host; a random key as its data."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def bits(tree: Any) -> dict[str, tuple[str, bytes]]:
    """Return dtype and bytes of every leaf, by path."""
    found = ((path, host(leaf)) for path, leaf in flatten(tree)[0])
    return {path: (str(x.dtype), x.tobytes()) for path, x in found}


def unmoved(state: rjax.RegionState) -> dict[str, tuple[str, bytes]]:
    """Return the bits of everything that a skipped step must not change."""
    return {
        path: value
        for path, value in bits(state).items()
        if path.split("/")[0] not in MOVES_ON_A_SKIP
    }


def digest(state: rjax.RegionState) -> str:
    """Return a hash of every bit of a state."""
    return hashlib.sha256(repr(sorted(bits(state).items())).encode()).hexdigest()


def benchmark(name: str) -> Any:
    """Import a part of the benchmarks as a script does, from their own folder."""
    folder = Path(__file__).parents[1] / "benchmarks"
    if not folder.exists():
        pytest.skip("a built package has no benchmarks", allow_module_level=True)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def fresh_process(script: str, **env: str) -> str:
    """Run a script that may import rjax and this module; return what it prints.

    It compiles for itself: what two processes have in common is then no third's work.
    """
    paths = [Path(rjax.__file__).parent.parent, Path(__file__).parent]
    path = os.pathsep.join(map(str, paths))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "PYTHONPATH": path,
            **env,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
