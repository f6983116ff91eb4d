"""A captured step: the same bits as the jitted one, never stale, never recompiled."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    BOTH,
    SIX,
    bits,
    both,
    config,
    fresh_process,
    make_rig,
    ones,
    pulled,
)

import rjax
from rjax.drawing import readable
from rjax.programs import trace
from rjax.step import find_plan

STATS = (("bn/mean", (5,), 0.0), ("bn/var", (5,), 1.0))


def with_stats(params, batch_stats, batch, key):
    """Pull the parameters, draw a number, and move the statistics by the batch."""
    noise = jax.random.uniform(key, (), jnp.float32)
    loss = pulled(params, batch) * (1 + noise)
    moved = jax.tree.map(lambda x: x + batch["gain"].astype(x.dtype), batch_stats)
    return loss, (moved, {"noise": noise, "parts": (loss, [loss])})


CONFIGS = {
    "nesterov": config(
        optimizer=rjax.optim.nesterov(),
        ema=rjax.Ema(0.9),
        scaling=rjax.scaling.dynamic(init=1024.0, interval=2),
    ),
    "adamw": config(
        precision="bf16",
        optimizer=rjax.optim.adamw(),
        clip=rjax.Clip(norm=0.5),
        learning_rate=optax.cosine_decay_schedule(0.1, 20),
    ),
    "optax": config(
        optimizer=rjax.optim.from_optax(optax.adam(0.1)), learning_rate=None
    ),
}


def batches(n=6):
    """Return batches of which the third overflows."""
    rng = np.random.default_rng(0)
    drawn = [
        {path: rng.normal(size=shape).astype(np.float32) for path, shape in SIX}
        for _ in range(n)
    ]
    drawn[2]["conv10/kernel"][..., 0] = np.inf
    return drawn


def run(step, state, data):
    reports = []
    for batch in data:
        state, report = step(state, batch)
        reports.append(report)
    return state, reports


@pytest.mark.standard_promotion  # Optax promotes
@pytest.mark.parametrize("name", CONFIGS)
def test_captured_and_reloaded_give_the_bits_of_the_jitted_step(name, tmp_path):
    rig = make_rig(SIX, CONFIGS[name], with_stats, stats=STATS)
    wanted = bits(run(rig.jitted, rig.state(), batches()))
    captured = rjax.capture(rig.eager, rig.state(), batches()[0])
    assert bits(run(captured, rig.state(), batches())) == wanted
    captured.save(tmp_path / "step.rjax")
    loaded = rjax.load_captured(tmp_path / "step.rjax", rig.plan)
    assert bits(run(loaded, rig.state(), batches())) == wanted
    # Saved in the middle and taken up by the other.
    state, reports = run(captured, rig.state(), batches()[:3])
    state, more = run(loaded, state, batches()[3:])
    assert bits((state, [*reports, *more])) == wanted
    assert int(state.skipped) == 1


@pytest.fixture(scope="module")
def rig():
    return make_rig(BOTH, config(ema=rjax.Ema(0.9)))


@pytest.fixture(scope="module")
def captured(rig):
    return rjax.capture(rig.eager, rig.state(), both(1.0))


@pytest.fixture(scope="module")
def loaded(captured, rig, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "step.rjax"
    assert captured.save(path) == path
    return rjax.load_captured(path, rig.plan)


@pytest.fixture(params=["captured", "loaded"])
def program(request):
    return request.getfixturevalue(request.param)


def test_nothing_is_stale_and_nothing_compiles(program, rig, compilations):
    state = rig.state()
    for rate in (0.1, 0.1, 0.01):
        state, _ = program(state.replace(learning_rate=rate), both(1.0))
    np.testing.assert_allclose(rig.both(state), 0.79, rtol=1e-6)
    # The loss scale is no part of the program: 40000 times 8192 overflows, times 1 not.
    state, report = program(rig.state(), both(40000.0))
    assert not report.applied and float(state.scale) == 4096.0
    state, report = program(state.replace(scale=1.0), both(40000.0))
    assert report.applied and float(report.scale) == 1.0
    state, report = program(state, both(np.nan))
    assert not report.applied and int(state.skipped) == 2
    helpers = {"jit_convert_element_type", "convert_element_type"}  # of `replace`
    assert len(compilations) <= len(helpers)
    before = len(compilations)
    for rate, g in ((1.0, 1.0), (2.0, np.inf), (0.5, np.nan)):
        state, _ = program(state.replace(learning_rate=rate, scale=2.0), both(g))
    assert len(compilations) == before


def test_a_schedule_counts_applied_steps():
    rate = lambda n: jnp.where(n < 2, 0.1, 0.01)  # noqa: E731
    rig = make_rig(BOTH, config(learning_rate=rate))
    step = rjax.capture(rig.eager, rig.state(), both(1.0))
    state, reports = run(
        step, rig.state(), [both(1.0), both(np.nan), both(1.0), both(1.0)]
    )
    np.testing.assert_allclose(rig.both(state), 0.79, rtol=1e-6)
    assert [float(r.learning_rate) for r in reports] == pytest.approx(
        [0.1, 0.1, 0.1, 0.01]
    )


def test_the_state_is_taken_over(program, rig):
    state = rig.state()
    new, _ = program(state, both(1.0))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves(new))
    with pytest.raises(ValueError, match="`state.master` was given away .*; go on"):
        program(state, both(1.0))


def test_one_array_in_two_places_is_refused(rig):
    program = rjax.capture(rig.eager, rig.state(), both(1.0))
    for _ in range(2):  # of a first call and of a later one, JAX complains otherwise
        state = rig.state()
        twice = state.replace(ema=state.master)
        with pytest.raises(ValueError, match="`state.master` and `state.ema` are one"):
            program(twice, both(1.0))
        program(rig.state(), both(1.0))


REFUSED = [
    (
        lambda s, b: (s, {**b, "bias": np.ones(4, np.float32)}),
        r"`batch\['bias'\]` is float32\[4\], the program was compiled for float32\[3\]",
    ),
    (
        lambda s, b: (s, {**b, "bias": np.ones(3, np.float16)}),
        r"`batch\['bias'\]` is float16\[3\], the program was compiled for float32\[3\]",
    ),
    (
        lambda s, b: (s, {**b, "more": 1.0}),
        r"`batch\['more'\]` is float32\[\], which the program was not compiled for: it "
        r"takes `batch\['bias'\]`, `batch\['kernel'\]`",
    ),
    (
        lambda s, b: (s, {"bias": b["bias"]}),
        r"`batch\['kernel'\]` is missing: .* compiled for float32\[3, 1\] there",
    ),
    (
        lambda s, b: (s, {**b, "bias": "three"}),
        r"`batch\['bias'\]` must be an array, got str",
    ),
    (
        lambda s, b: (dataclasses.replace(s, mu=jnp.zeros(4)), b),
        r"`state.mu` is float32\[4\], which the program was not compiled for",
    ),
    (
        lambda s, b: (dataclasses.replace(s, master=s.master[:-1]), b),
        r"`state.master` is float32\[255\], the program was compiled for "
        r"float32\[256\]",
    ),
    (
        lambda s, b: (b, b),
        r"`state\['bias'\]` is float32\[3\], which the program was not compiled for: "
        r"it takes `state.master`, .* and \d+ more",
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_what_it_was_not_compiled_for_is_refused(program, rig, change, said):
    state, batch = change(rig.state(), both(1.0))
    with pytest.raises(ValueError, match=said) as caught:
        program(state, batch)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    # A refusal takes nothing over, and the program still runs.
    program(rig.state(), both(1.0))


def test_the_same_arrays_in_other_containers_are_refused():
    plan = rjax.make_plan({"w": jnp.ones(3)}, config())
    loss = rjax.stateless_loss(lambda p, b: jnp.sum(p["w"]) * b[0])
    state = rjax.init_state(plan, {"w": jnp.ones(3)})
    step = rjax.capture(rjax.make_train_step(loss, plan), state, (jnp.float32(1),))
    with pytest.raises(ValueError, match="`batch` is PyTree.*compiled for PyTree"):
        step(state, [jnp.float32(1)])


def test_shapes_are_enough(rig):
    state = jax.eval_shape(rig.state)
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, both(1.0)))
    step = rjax.capture(rig.eager, state, batch)
    found = run(step, rig.state(), [both(1.0)] * 2)
    assert bits(found) == bits(run(rig.jitted, rig.state(), [both(1.0)] * 2))


def test_a_step_around_ours_is_captured_too(rig):
    def doubled(state, batch):
        state, first = rig.eager(state, batch)
        state, second = rig.eager(state, batch)
        return state, (first, second)

    step = rjax.capture(jax.jit(doubled), rig.state(), both(1.0))
    state, (first, second) = step(rig.state(), both(1.0))
    assert int(state.step) == 2 and int(second.step) == 1 and step.plan is None
    assert step.name == "doubled"
    assert rjax.capture(jax.jit(rig.eager), rig.state(), both(1.0)).plan is rig.plan
    assert find_plan(functools.partial(jax.jit(rig.eager), batch=3)) is rig.plan
    assert find_plan(functools.wraps(rig.eager)(lambda s, b: None)) is rig.plan


def test_host_labels_of_64_bits_are_what_jit_makes_of_them(rig):
    plan = rjax.make_plan({"w": jnp.ones(3)}, config())
    loss = rjax.stateless_loss(lambda p, b: jnp.sum(p["w"][b].astype(jnp.float32)))
    state = rjax.init_state(plan, {"w": jnp.ones(3)})
    step = rjax.capture(rjax.make_train_step(loss, plan), state, np.array([0, 2]))
    assert step.signature.batch[0].dtype == "int32"
    _, report = step(state, np.array([0, 2]))
    assert float(report.loss) == 2.0


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda s, b: s, "`step` must return a pair"),
        (lambda s, b: (s.master, b), "`step` must return a state like the one it was"),
        (
            lambda s, b: (jax.tree.map(lambda x: jnp.stack([x]), s), b),
            r"`state.master` is float32\[256\], then float32\[1, 256\]",
        ),
    ],
)
def test_a_step_that_cannot_go_on_is_refused(rig, step, said):
    with pytest.raises(ValueError, match=said):
        rjax.capture(step, rig.state(), both(1.0))


ELSEWHERE = """
import tempfile
import jax
import numpy as np
from helpers import BOTH, both, config, make_rig
import rjax

rig = make_rig(BOTH, config())
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
data = jax.tree.map(jax.numpy.asarray, both(1.0))
here = rjax.capture(rig.eager, rig.state(), data)
there = rjax.capture(rig.eager, *jax.device_put((rig.state(), data), everywhere))
state, _ = there(rig.state(), data)  # what was put nowhere goes where it has to
state, _ = there(*jax.device_put((rig.state(), data), everywhere))
print(*rig.both(state).ravel(), len(state.master.sharding.device_set))
for place in (jax.devices()[1], everywhere):
    try:
        here(jax.device_put(rig.state(), place), data)
    except ValueError as error:
        print(error)
with tempfile.TemporaryDirectory() as folder:
    again = rjax.load_captured(there.save(folder + "/step.rjax"), rig.plan)
state, _ = again(*jax.device_put((rig.state(), data), everywhere))
print(*rig.both(state).ravel(), len(state.master.sharding.device_set))
"""


def test_other_devices_are_refused_in_a_sentence():
    flag = "--xla_force_host_platform_device_count=2"
    moved, other, all_of_them, saved = fresh_process(
        ELSEWHERE, XLA_FLAGS=flag
    ).splitlines()
    *weights, devices = moved.split()
    assert [float(x) for x in weights] == pytest.approx([0.9] * 6) and devices == "2"
    assert saved == moved
    assert re.fullmatch(
        "`state.master` lies on (cpu:1|TFRT_CPU_1), the program was compiled for "
        "(cpu:0|TFRT_CPU_0); move it with `jax.device_put`, or capture the step for "
        "arguments that lie there.",
        other,
    )
    assert re.search(r"lies on .*0, .*1 as P\w*\(\), the program was", all_of_them)


def test_it_cannot_be_traced_again(program, rig):
    with pytest.raises(
        ValueError, match="`train_step` is a compiled program, which can"
    ):
        jax.jit(lambda s, b: program(s, b))(rig.state(), both(1.0))


def test_compiler_options_reach_xla(rig):
    with pytest.raises(Exception, match="xla_no_such_option"):
        rjax.capture(
            rig.eager, rig.state(), both(1.0),
            compiler_options={"xla_no_such_option": True},
        )  # fmt: skip


def test_it_tells_of_itself(captured, loaded, rig):
    assert re.fullmatch(
        r"Captured\(name=train_step, state=\d+ arrays, batch=2 arrays, device=\S.*, "
        rf"plan={rig.plan.fingerprint[:12]}\)",
        repr(captured),
    )
    page = captured._repr_html_()
    assert page.startswith("<div><p><b>rjax program</b>: train_step, compiled in ")
    stages, memory = captured.stages(), captured.memory()
    for label in (f"stages: {stages.summary}", f"memory: {memory.summary}"):
        assert f"<summary>{label}</summary>" in page
    assert "forward_backward" in page and "temporaries" in page
    assert f"<b>rjax stages</b>: {stages.kernels} kernels, " in stages._repr_html_()
    peak = readable(memory.peak)
    assert f"<b>rjax memory</b>: {peak} a call</p>" in memory._repr_html_()
    assert captured.compile_seconds > 0 and loaded.compile_seconds > 0
    assert "stablehlo" in captured.hlo("lowered")
    assert loaded.signature == captured.signature
    cost = captured.cost()
    assert cost["flops"] > 0 and cost["bytes accessed"] > 0


def test_memory_is_that_of_the_arenas(program, rig):
    memory = program.memory()
    n, half = 4 * rig.plan.n, 2 * (rig.plan.n - rig.plan.bias_like)
    assert memory.state["master"] == memory.state["ema"] == n
    assert memory.state["compute"] == memory.state["ema_compute"] == half
    assert memory.state["results"] == memory.state["key"] == 8
    assert "mu" not in memory.state and memory.batch == 24
    state = sum(
        x.size * (8 if "key" in str(x.dtype) else x.dtype.itemsize)
        for x in jax.tree.leaves(rig.state())
    )
    assert sum(memory.state.values()) == state
    assert memory.temporaries > 0
    assert memory.peak == state + 24 + memory.report + memory.temporaries
    text = str(memory).splitlines()
    assert text[0].split() == ["memory", "bytes"] and text[2].startswith("state.master")
    assert text[-1].split()[1] == f"{memory.peak:,}"


def test_tracing_takes_no_state_over(rig):
    state = rig.state()
    traced = trace(rig.eager, state, both(1.0))
    assert traced.plan is rig.plan and not state.master.is_deleted()
    traced.compile()(state, both(1.0))
    assert state.master.is_deleted()


def test_ones_are_pulled(captured, rig):
    """The rig of this file does what it says: one step of rate 0.1 along 1."""
    state, _ = captured(rig.state(), ones(BOTH))
    np.testing.assert_allclose(rig.both(state), 0.9, rtol=1e-6)
