"""What only a GPU can show: training there, overflow in its products, its bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rjax

pytestmark = pytest.mark.gpu


def _train(model, precision, steps):
    """Train on digits; return plan, state, the last report and the test accuracy."""
    digits = rjax.data.load_digits()
    images, labels = digits.test
    variables = model.init(jax.random.key(0), digits.train[0][:1])
    stats = variables.get("batch_stats", {})
    config = rjax.Config(precision=precision, learning_rate=0.05, ema=rjax.Ema(0.98))
    plan = rjax.make_plan(variables["params"], config, batch_stats=stats)
    state = rjax.init_state(plan, variables["params"], stats)
    loss_fn = rjax.linen_loss(model, rjax.ops.softmax_cross_entropy)
    step = jax.jit(rjax.make_train_step(loss_fn, plan), donate_argnums=0)
    for i in range(steps):
        state, report = step(state, rjax.data.batch_at(digits.train, 64, 0, i))

    def correct(params, stats, batch):
        variables = {"params": params, "batch_stats": stats}
        return jnp.mean((model.apply(variables, batch).argmax(-1) == labels) * 1.0)

    accuracy = jax.jit(rjax.make_eval_step(correct, plan))(state, jnp.asarray(images))
    return plan, state, report, float(accuracy)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_the_cnn_learns_digits(precision):
    _, state, report, accuracy = _train(rjax.nn.CNN(num_classes=10), precision, 300)
    assert accuracy >= 0.97
    assert int(state.skipped) == 0 and bool(report.applied)


@pytest.mark.standard_promotion
def test_two_runs_of_the_mlp_give_the_same_bits():
    model = rjax.nn.MLP((64, 32), num_classes=10)
    first, second = (_train(model, "fp16", 60)[1] for _ in range(2))
    for name in ("master", "mu", "ema", "compute", "ema_compute"):
        a, b = (np.asarray(getattr(s, name)) for s in (first, second))
        assert a.tobytes() == b.tobytes(), name


@pytest.mark.parametrize(("value", "skipped"), [(255.875, False), (256.0, True)])
def test_an_overflow_inside_a_product_skips(value, skipped):
    """The gradient of a kernel is the scaled sum 256 * value: 65520 is too much."""
    params = {"kernel": jnp.zeros((1, 1))}
    config = rjax.Config(optimizer=rjax.optim.sgd(), scaling=rjax.scaling.off())
    plan = rjax.make_plan(params, config)

    def loss(params, x):
        return jnp.sum((x @ params["kernel"]).astype(jnp.float32))

    step = jax.jit(rjax.make_train_step(rjax.stateless_loss(loss), plan))
    x = jnp.full((256, 1), value, jnp.float16)
    state, report = step(rjax.init_state(plan, params), x)
    assert bool(report.applied) != skipped
