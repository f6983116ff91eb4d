"""Weights in and out of the state: views, replacement, the average adopted."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from rjax.plan import Plan
from rjax.state import (
    RegionState,
    assemble,
    check_values,
    complete,
    copied,
    stored,
    views,
)

Which = Literal["master", "compute", "ema", "ema_compute"]


def get_params(plan: Plan, state: RegionState, which: Which = "master") -> Any:
    """Return parameters as an ordinary tree of the model's structure.

    Args:
        plan: the state's plan.
        state: the training state.
        which: "master" or "ema": float32 leaves; "compute" or "ema_compute": what a
            forward pass sees, kernels in half precision (float32 in fp32).

    Returns:
        Pytree of the model's structure and shapes, frozen parameters included.

    Raises:
        ValueError: for an unknown name, or an average where the plan keeps none.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config(ema=rjax.Ema(0.9)))
        >>> state = rjax.init_state(plan, params)
        >>> variables = {"params": rjax.get_params(plan, state, which="ema")}
        >>> rjax.get_params(plan, state, which="compute")["w"].dtype.name
        'float16'
    """
    check_which(plan, which)
    arena = state.ema if which.startswith("ema") else state.master
    half = state.ema_compute if which.startswith("ema") else state.compute
    assert arena is not None
    if which in ("master", "ema"):
        wide = {p: x.astype(jnp.float32) for p, x in state.frozen.items()}
        return assemble(plan, views(plan, arena, None), wide)
    return assemble(plan, views(plan, arena, half), state.frozen)


def get_batch_stats(
    plan: Plan, state: RegionState, which: Literal["current", "ema"] = "current"
) -> Any:
    """Return the running statistics, current or averaged.

    Args:
        plan: the state's plan.
        state: the training state.
        which: "current" or "ema".

    Returns:
        Pytree of float32 arrays, as the model has it; `{}` without statistics.

    Raises:
        ValueError: for an unknown name, or "ema" where the plan keeps no average.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> stats = {"bn": {"mean": jnp.zeros(2)}}
        >>> plan = rjax.make_plan(params, rjax.Config(), stats)
        >>> state = rjax.init_state(plan, params, stats)
        >>> rjax.get_batch_stats(plan, state)["bn"]["mean"].tolist()
        [0.0, 0.0]
    """
    if which == "current":
        return state.batch_stats
    if which != "ema":
        raise ValueError(f"`which` must be 'current' or 'ema', got {which!r}.")
    check_which(plan, "ema")
    return state.ema_batch_stats


def replace_params(
    plan: Plan,
    state: RegionState,
    params: Any,
    ema: Literal["keep", "copy"] = "keep",
) -> RegionState:
    """Put new weights in the masters, the compute copy and the frozen parameters.

    Momenta, scale and counters stay.

    Args:
        plan: the state's plan.
        state: the training state.
        params: parameter tree of the plan's structure, floating and finite.
        ema: "keep" the average, or restart it as a "copy" of the new weights.

    Returns:
        The state, with the new weights.

    Raises:
        ValueError: by path, for a wrong structure, shape, dtype or value.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config(ema=rjax.Ema(0.9)))
        >>> state = rjax.init_state(plan, params)
        >>> state = rjax.replace_params(plan, state, {"w": jnp.zeros((4, 2))})
        >>> [float(arena[0]) for arena in (state.master, state.compute, state.ema)]
        [0.0, 0.0, 1.0]
    """
    if ema not in ("keep", "copy"):
        raise ValueError(f"`ema` must be 'keep' or 'copy', got {ema!r}.")
    leaves = complete(plan, params)
    master, compute, frozen = jax.jit(stored, static_argnums=0)(plan, leaves)
    new = dataclasses.replace(state, master=master, compute=compute, frozen=frozen)
    if ema == "copy" and plan.gates.ema:
        new = dataclasses.replace(
            new, ema=jnp.copy(master), ema_compute=copied(compute)
        )  # fmt: skip
    check_values(plan, new, "params")
    return new


def adopt_ema(plan: Plan, state: RegionState) -> RegionState:
    """Make the average the weights: E -> W, the half copies, the statistics.

    The average itself stays, in buffers of its own.

    Args:
        plan: the state's plan.
        state: the training state.

    Returns:
        The state, with the average in its masters.

    Raises:
        ValueError: if the plan keeps no average.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config(ema=rjax.Ema(0.9)))
        >>> state = rjax.init_state(plan, params)
        >>> zeros = {"w": jnp.zeros((4, 2))}
        >>> state = rjax.replace_params(plan, state, zeros)  # the average stays at one
        >>> float(rjax.get_params(plan, rjax.adopt_ema(plan, state))["w"][0, 0])
        1.0

    Source: the SEMA switch of the article's framework.
    """
    check_which(plan, "ema")
    return dataclasses.replace(
        state,
        master=copied(state.ema),
        compute=copied(state.ema_compute),
        batch_stats=copied(state.ema_batch_stats),
    )


def check_which(plan: Plan, which: str) -> None:
    """Raise a `ValueError` unless the plan has such weights."""
    if which not in ("master", "compute", "ema", "ema_compute"):
        raise ValueError(
            "`which` must be 'master', 'compute', 'ema' or 'ema_compute', "
            f"got {which!r}."
        )
    if which.startswith("ema") and not plan.gates.ema:
        raise ValueError(
            "The plan keeps no average; make it with Config(ema=rjax.Ema(decay=...))."
        )
