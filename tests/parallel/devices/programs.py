"""The programs that run on several devices: what is in them, and what they cost."""

import re

import jax
import numpy as np
import pytest
from helpers import BOTH, bits, config
from jax.extend.core import Var
from parallel.devices.agreement import NET
from parallel.rigs import EIGHT, LARS, SHARDED, Over, images, network, pull, rows

import rjax
from rjax.inflight import STAGES


@pytest.mark.parametrize("over", [EIGHT, SHARDED], ids=str)
def test_steps_compile_once_and_take_the_state_over(over, compilations):
    rig = pull(over, LARS)
    batch = rows(0)
    state = rig.state()
    first = state
    state, _ = rig.jitted(state, batch)
    compilations.clear()
    for _ in range(2):
        state, _ = rig.jitted(state, batch)
    assert not compilations
    gone = [x.is_deleted() for x in jax.tree.leaves(first) if x.size > 1]
    assert gone and all(gone)


@pytest.mark.parametrize("sharded", [False, True])
def test_scans_captured_and_saved_programs_give_the_bits_of_a_loop(sharded, tmp_path):
    rig = pull(Over(2, sharded), config(), BOTH)
    batches = [rows(i, BOTH, n=2) for i in range(2)]
    right, reports = rig.run(*batches)
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
    state, _ = jax.jit(lambda s, x: jax.lax.scan(rig.step, s, x))(rig.state(), stacked)
    assert bits(state) == bits(right)
    batches = [rig.step.shard_batch(batch) for batch in batches]
    state = rig.state()
    program = rjax.capture(rig.step, state, batches[0])
    program.assert_static()
    for batch, report in zip(batches, reports, strict=True):
        state, found = program(state, batch)
        assert bits(found) == bits(report)
    assert bits(state) == bits(right)
    loaded = rjax.load_captured(program.save(tmp_path / "step.rjax"), rig.plan)
    state = first = rig.state()
    for batch in batches:
        state, _ = loaded(state, batch)
    assert bits(state) == bits(right) and first.master.is_deleted()
    assert state.master.sharding.is_fully_replicated is not sharded
    with pytest.raises(ValueError, match="compiled for"):
        program(state, rows(0, BOTH, n=4))


@pytest.mark.parametrize("over", [EIGHT, Over(4, sharded=True)], ids=str)
def test_every_stage_is_named_and_only_gradients_are_reduced_whole(over):
    rig = network(over, NET)
    lowered = jax.jit(rig.step).lower(rig.state(), rig.step.shard_batch(images(0)))
    named = lowered.as_text(debug_info=True)
    for name in STAGES:
        if name != "digest_grads":
            assert re.search(rf"[/\"]{name}[/\"]", named), name
    text = lowered.as_text()
    reduced = _sizes(text, "all_reduce", 100)
    plan = rig.plan
    deep = plan.n - plan.slots[-1].offset
    if over.sharded:
        assert _sizes(text, "reduce_scatter", 100) == [plan.n]
        assert not reduced
    else:
        # The deep bucket takes the loss and the one metric along.
        assert reduced == [deep + 2, plan.n - deep]
        assert "reduce_scatter" not in text


def _sizes(text: str, op: str, least: int) -> list[int]:
    """Return the elements that float32 collectives of a kind move, if many."""
    found = re.findall(
        rf'"stablehlo\.{op}".*?\}}\) : \(tensor<(\d+)xf32>\)', text, re.DOTALL
    )
    return [int(n) for n in found if int(n) >= least]


def test_the_deep_bucket_waits_for_nothing_of_the_first_layer():
    rig = network(EIGHT, NET)
    jaxpr = jax.make_jaxpr(rig.step)(rig.state(), images(0)).jaxpr
    while len(jaxpr.eqns) == 1 or "shard_map" in str(jaxpr.eqns[-1].primitive):
        inner = jaxpr.eqns[-1].params["jaxpr"]
        jaxpr = getattr(inner, "jaxpr", inner)
    plan = rig.plan
    deep = plan.n - plan.slots[-1].offset
    first, last = (
        next(
            eqn
            for eqn in jaxpr.eqns
            if eqn.primitive.name.startswith("psum")
            and eqn.invars[0].aval.shape == (n,)
        )
        for n in (deep + 2, plan.n - deep)
    )
    early, late = (_behind(jaxpr, eqn) for eqn in (first, last))
    assert id(first) not in late and id(last) not in early
    # Two convolutions forward, and backward the gradients of the deep kernel and of
    # what it reads; only the late bucket needs the latter, and the first kernel's.
    counts = [
        sum("conv" in eqn.primitive.name for eqn in jaxpr.eqns if id(eqn) in found)
        for found in (early, late)
    ]
    assert counts == [3, 4]


def _behind(jaxpr, eqn) -> set[int]:
    """Return the equations that one depends on."""
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    found: set[int] = set()
    todo = [eqn]
    while todo:
        for var in todo.pop().invars:
            maker = makers.get(var) if isinstance(var, Var) else None
            if maker is not None and id(maker) not in found:
                found.add(id(maker))
                todo.append(maker)
    return found
