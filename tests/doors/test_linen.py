"""What `linen_loss` does for modules with collections, streams and float32 layers."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from doors.models import LinenResNet

import rjax

pytestmark = pytest.mark.standard_promotion  # stock Flax
KEY = jax.random.key(0)
X, Y = np.ones((4, 6), np.float32), np.zeros(4, np.int32)


def _criterion(outputs, targets):
    return rjax.ops.softmax_cross_entropy(outputs, targets)


class Stock(nn.Module):
    """Two dense layers, the first of which may have a dtype."""

    dtype: type | None = None
    wrap: str = ""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense
        if self.wrap == "remat":
            layer = nn.remat(nn.Dense)
        first = layer(6, dtype=self.dtype, name="first")
        return nn.Dense(3, dtype=jnp.float16, name="last")(first(x))


def _warned(module, precision="fp16", rule=None):
    """Return the messages of tracing one step."""
    params = jax.jit(module.init)(KEY, X)["params"]
    plan = rjax.make_plan(params, rjax.Config(precision=precision), rule=rule)
    step = rjax.make_train_step(rjax.linen_loss(module, _criterion), plan)
    state = rjax.init_state(plan, params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            jax.make_jaxpr(lambda *args: step(*args))(state, (X, Y))  # traced anew
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("dtype", [None, jnp.float32])
@pytest.mark.parametrize("wrap", ["", "remat"])
def test_a_layer_that_computes_in_float32_is_named_once(dtype, wrap):
    (message,) = _warned(Stock(dtype, wrap))
    assert "Stock" in message and "first/kernel'" in message
    assert "last/kernel" not in message
    assert "float16" in message and "`dtype`" in message


def test_no_warning_where_there_is_nothing_to_warn_of():
    assert _warned(Stock(jnp.float16)) == []
    assert _warned(Stock(), "fp32") == []

    def rule(path, leaf):
        return rjax.Param(precision="float32") if "first" in path else None

    assert _warned(Stock(), rule=rule) == []
    assert _warned(rjax.nn.MLP((6,), 3)) == []


def test_many_layers_are_counted():
    module = nn.Sequential([nn.Dense(6) for _ in range(6)])
    (message,) = _warned(module)
    assert message.count("kernel'") == 3 and "and 3 more" in message


class Standardised(nn.Module):
    """A kernel that is normalised before use, in float32 or back in half."""

    back: bool

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(), (6, 3), jnp.float32)
        wide = kernel.astype(jnp.float32)
        wide = (wide - wide.mean(0)) / wide.std(0)
        used = wide.astype(kernel.dtype) if self.back else wide
        return x @ used


def test_a_kernel_is_followed_through_what_is_made_of_it():
    assert len(_warned(Standardised(back=False))) == 1
    assert _warned(Standardised(back=True)) == []


class Similar(nn.Module):
    """Products of activations in float32, which is nobody's slip."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(), (6, 3), jnp.float32)
        wide = (x @ kernel).astype(jnp.float32)
        return wide @ (wide.T @ wide)


def test_products_of_activations_may_be_wide():
    assert _warned(Similar()) == []


class Nested(nn.Module):
    """A product within a conditional or a loop."""

    scan: bool

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.normal(), (6, 3), jnp.float32)

        def wide(x):
            return x.astype(jnp.float32) @ kernel.astype(jnp.float32)

        if self.scan:
            return jax.lax.scan(lambda _, row: (None, wide(row)), None, x)[1]
        return jax.lax.cond(x.sum() > 0, wide, lambda x: wide(2 * x), x)


@pytest.mark.parametrize("scan", [False, True])
def test_products_in_conditionals_and_loops_are_seen(scan):
    assert len(_warned(Nested(scan))) == 1


class Everything(nn.Module):
    """A module of many streams and collections, told that it is trained."""

    @nn.compact
    def __call__(self, x, deterministic: bool = True, training: bool = False):
        assert deterministic is not training
        counter = self.variable("counts", "calls", jnp.zeros, (), jnp.int32)
        if training:
            counter.value += 1
        self.sow("intermediates", "x", x)
        noise = self.make_rng("noise") if training else KEY
        draw = jax.random.normal(noise, (3,), jnp.float16)
        x = nn.BatchNorm(not training, dtype=jnp.float16)(x)
        x = nn.Dropout(0.5, deterministic=deterministic)(x)
        self.sow("draws", "noise", draw) if training else None
        return nn.Dense(3, dtype=jnp.float16)(x)


def test_collections_and_streams_travel():
    module = Everything()
    variables = module.init(KEY, X)
    carried = {k: variables[k] for k in ("batch_stats", "counts")}
    plan = rjax.make_plan(variables["params"], rjax.Config(), carried)
    loss_fn = rjax.linen_loss(
        module,
        _criterion,
        collections=("batch_stats", "counts"),
        rngs=("dropout", "noise"),
    )
    step = jax.jit(rjax.make_train_step(loss_fn, plan))
    state = rjax.init_state(plan, variables["params"], carried)
    for batch in ((X, Y), (X * np.float32(np.nan), Y), (X, Y)):
        state, _ = step(state, batch)
    stats = rjax.get_batch_stats(plan, state)
    assert int(stats["counts"]["calls"]) == 2, "the skipped step counts for nothing"
    assert float(stats["batch_stats"]["BatchNorm_0"]["mean"][0]) > 0


class Drawing(nn.Module):
    """Returns what it draws."""

    @nn.compact
    def __call__(self, x):
        self.param("kernel", nn.initializers.ones, (1, 1), jnp.float32)
        one, two = self.make_rng("dropout"), self.make_rng("noise")
        return jnp.stack([jax.random.uniform(one), jax.random.uniform(two)])


def test_every_stream_has_a_key_of_its_own_made_from_the_step():
    def criterion(outputs, targets):
        return outputs.sum(), {"drawn": outputs}

    loss_fn = rjax.linen_loss(Drawing(), criterion, rngs=("dropout", "noise"))
    params = {"kernel": jnp.ones((1, 1))}

    def drawn(key):
        return np.asarray(loss_fn(params, {}, (X, Y), key)[1][1]["drawn"])

    first = drawn(jax.random.key(1))
    assert first[0] != first[1]
    assert (first == drawn(jax.random.key(1))).all()
    assert (first != drawn(jax.random.key(2))).all()


@pytest.mark.parametrize(
    ("carried", "match"),
    [({}, "running statistics; give them"), ({"norm": 1.0}, "batch statistics")],
)
def test_statistics_of_another_structure_are_refused(carried, match):
    module = LinenResNet()
    images = np.ones((2, 8, 8, 1), np.float32)
    params = jax.jit(module.init)(KEY, images)["params"]
    loss_fn = rjax.linen_loss(module, _criterion)
    with pytest.raises(ValueError, match=match):
        plan = rjax.make_plan(params, rjax.Config(), carried)
        state = rjax.init_state(plan, params, carried)
        step = rjax.make_train_step(loss_fn, plan)
        jax.eval_shape(step, state, (images, np.zeros(2, np.int32)))


def test_collections_that_were_not_given_are_named():
    loss_fn = rjax.linen_loss(Everything(), _criterion, collections=("counts",))
    params = Everything().init(KEY, X)["params"]
    with pytest.raises(ValueError, match=r"dictionary of the collections \['counts'\]"):
        loss_fn(params, {}, (X, Y), KEY)


@pytest.mark.parametrize(
    "returned",
    [None, {"loss": 1.0}, np.int32(3), (1.0, {}, {}), "no", [[1.0], [1.0, 2.0]]],
)
def test_a_criterion_that_returns_no_loss_is_told(returned):
    loss_fn = rjax.linen_loss(rjax.nn.MLP((), 3), lambda outputs, targets: returned)
    params = rjax.nn.MLP((), 3).init(KEY, X)["params"]
    with pytest.raises(ValueError, match="`criterion` must return a floating loss"):
        loss_fn(params, {}, (X, Y), KEY)


def test_a_batch_that_is_no_pair_is_told():
    loss_fn = rjax.linen_loss(rjax.nn.MLP((), 3), _criterion)
    with pytest.raises(ValueError, match="pair"):
        loss_fn({}, {}, (X, Y, Y), KEY)
