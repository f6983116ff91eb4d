"""Every snippet of the page on front doors runs; every row of its tables means it."""

import copy
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doc_pages import read_page

import rjax

PAGE = read_page("adoption.md")
TABLES = re.split(r"^### (.*)$", PAGE.text, flags=re.M)[1:]
ROWS = [
    (TABLES[i], *row)
    for i in range(0, len(TABLES), 2)
    for row in re.findall(
        r"^\| (`.*?|the .*?) \| `(.*?)`[^`\n]*\|$", TABLES[i + 1], re.M
    )
    if row[1] != "rjax"
]

pytestmark = pytest.mark.standard_promotion  # stock Flax, Equinox and Optax


@pytest.mark.parametrize("title", PAGE.titled)
def test_snippet_runs(title):
    if title == "Equinox":
        pytest.importorskip("equinox")
    scope = PAGE.run(PAGE.titled[title])
    if "report" in scope:
        assert scope["report"].applied and np.isfinite(scope["report"].loss)
    if "applied" in scope:
        assert scope["applied"] and float(scope["scaling"].scale) == 8192.0


def test_every_door_has_a_snippet():
    titles = "Flax Linen, Flax NNX, Equinox, Optax, Frozen weights and adapters".split(
        ", "
    )
    assert [*PAGE.titled] == [*titles, "Your own loop"]
    assert len(PAGE.titled) == len(PAGE.snippets)


@pytest.fixture(scope="module")
def loop():
    """What the loop of the page has made, with a step under way."""
    scope = PAGE.run(PAGE.titled["Your own loop"])
    scope["view"] = rjax.compute_view(scope["params"])
    run = rjax.scaled_value_and_grad(scope["loss_fn"], scope["scaling"])
    _, scope["grads"] = run(scope["view"], scope["batch"])
    return scope


def _kinds(tree):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}


def _is_rule(scope, **expected):
    rule = scope["scaling"].rule
    return all(getattr(rule, name) == value for name, value in expected.items())


def _is_differentiated(scope):
    """Whether loss and gradients are those of the unscaled loss in float32."""
    loss, grads = jax.value_and_grad(scope["loss_fn"])(scope["view"], scope["batch"])
    same = jax.tree.map(
        lambda a, b: np.allclose(a, b, rtol=1e-2, atol=1e-3), scope["grads"], grads
    )
    near = np.allclose(scope["loss"], loss, rtol=1e-3)
    return near and all(jax.tree.leaves(same)) and _kinds(scope["grads"]) == {"float32"}


def _is_applied(scope):
    moved, wanted = scope["state"], scope["before"]["state"]
    apart = [
        bool((a != b).any())
        for a, b in zip(*map(jax.tree.leaves, (moved[0], wanted[0])), strict=True)
    ]
    return bool(scope["applied"]) and all(apart) and int(scope["scaling"].skipped) == 0


def _differs_over_axis(scope):
    # Outside of any mapped axis, the name is not bound: it is really used.
    with pytest.raises(NameError, match="data"):
        scope["run"](scope["view"], scope["batch"])
    return True


def _skips(scope):
    nan = jax.tree.map(lambda g: g * jnp.nan, scope["grads"])
    return (
        bool(scope["applied"])
        and not rjax.apply_gated(lambda grads, state: state, scope["scaling"], nan, ())[
            2
        ]
    )


DYNAMIC = {"initial": 65536.0, "growth": 2.0, "backoff": 0.5, "interval": 2000}
KEPT = {"float32"}
CHECKS = {
    'autocast("cuda", torch.float16)': lambda s: (
        _kinds(s["view"]) == {"float16", *KEPT}
    ),
    'autocast("cuda", torch.bfloat16)': lambda s: (
        _kinds(s["view"]) == {"bfloat16", *KEPT}
    ),
    "autocast(enabled=False)": lambda s: _kinds(s["view"]) == KEPT,
    "GradScaler()": lambda s: _is_rule(s, **DYNAMIC),
    "GradScaler(enabled=False)": lambda s: _is_rule(s, scale=1.0),
    "scaler.scale(loss).backward()": _is_differentiated,
    "scaler.unscale_(optimizer)": lambda s: 0.1 < float(s["norm"]) < 10.0,
    "clip_grad_norm_(parameters, 1.0)": lambda s: hasattr(s["tx"], "update"),
    "scaler.step(optimizer)": _is_applied,
    "scaler.get_scale()": lambda s: float(s["scale"]) == 8192.0,
    "scaler.state_dict()": lambda s: len(s["saved"]) == 3,
    "the loop as a whole": lambda s: bool(
        s["step"](rjax.init_state(s["step"].plan, s["params"]), s["batch"])[1].applied
    ),
    "DynamicScale()": lambda s: _is_rule(s, **DYNAMIC),
    "DynamicScale(growth_interval=10, scale=1024.0)": lambda s: _is_rule(
        s, **{**DYNAMIC, "initial": 1024.0, "interval": 11}
    ),
    "dynamic_scale.value_and_grad(loss_fn)(view, batch)": _is_differentiated,
    "value_and_grad(fn, argnums=1, has_aux=True)": _is_differentiated,
    'value_and_grad(loss_fn, axis_name="data")': _differs_over_axis,
    "jnp.where(is_fin, new, old)": _is_applied,
    "dynamic_scale.scale": lambda s: float(s["scale"]) == 8192.0,
    'get_policy("params=float32,compute=float16,output=float32")': lambda s: (
        s["policy"].compute_dtype == jnp.float16
    ),
    "policy.cast_to_compute(params)": lambda s: _kinds(s["view"]) == {"float16", *KEPT},
    "StaticLossScale(2 ** 15)": lambda s: _is_rule(s, scale=32768.0),
    "DynamicLossScale(jnp.float32(2 ** 15))": lambda s: _is_rule(
        s, **{**DYNAMIC, "initial": 32768.0}
    ),
    "NoOpLossScale()": lambda s: _is_rule(s, scale=1.0),
    "loss_scale.scale(loss)": _is_differentiated,
    "policy.cast_to_param(grads)": _is_differentiated,
    "all_finite(grads), jmp": _is_applied,
    "loss_scale.loss_scale": lambda s: float(s["scale"]) == 8192.0,
    "cast_to_half_precision(params)": lambda s: _kinds(s["view"]) == {"float16"},
    "DynamicLossScaling(2 ** 15, 1.0, period=2000)": lambda s: _is_rule(
        s, **{**DYNAMIC, "initial": 32768.0, "floor": 1.0}
    ),
    "filter_value_and_grad(loss_fn, scaling)(model, batch)": _is_differentiated,
    "filter_grad(loss_fn, scaling, has_aux=True)": lambda s: callable(s["run"]),
    "optimizer_update(model, tx, opt_state, grads, finite)": _is_applied,
    "force_full_precision(jax.nn.log_softmax, dtype)": lambda s: (
        s["losses"].dtype == jnp.float32
    ),
    "all_finite(grads), mpx": _skips,
}


def _name(library, call):
    first = call.split("`")[1] if call.startswith("`") else call
    return f"{first}, {library}" if first == "all_finite(grads)" else first


def test_every_row_is_checked():
    assert [_name(library, call) for library, call, _ in ROWS] == list(CHECKS)


@pytest.mark.parametrize(
    ("library", "call", "code"),
    ROWS,
    ids=[f"{lib}-{i}" for i, (lib, *_) in enumerate(ROWS)],
)
def test_a_row_does_what_it_stands_beside(library, call, code, loop):
    scope = {**loop, "before": copy.copy(loop)}
    exec(compile(code, code, "exec"), scope)
    assert CHECKS[_name(library, call)](scope)


def test_halves_follow_the_dynamic_scale_of_flax():
    from flax.training.dynamic_scale import DynamicScale

    # Flax looks at the count before it counts: it grows a step later.
    flax = DynamicScale(growth_interval=1, scale=1024.0)
    own = rjax.LossScale.init(rjax.scaling.dynamic(1024.0, interval=2))
    w = jnp.ones(3)
    for factor in (1.0, 2.0, np.inf, 1.0, 1.0, np.nan, 3.0, 4.0):
        batch = jnp.float32(factor)

        def loss(w, batch):
            return (w * w * batch).sum()

        flax, finite, _, wanted = flax.value_and_grad(loss)(w, batch)
        _, grads = rjax.scaled_value_and_grad(loss, own)(w, batch)
        _, own, applied = rjax.apply_gated(lambda g, w: w, own, grads, w)
        assert bool(applied) == bool(finite)
        np.testing.assert_array_equal(grads, wanted)
        assert float(own.scale) == float(flax.scale)
