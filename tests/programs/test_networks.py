"""Networks captured and reloaded on a GPU: the bits of the jitted step, no host."""

import pytest
from helpers import fresh_process

SCRIPT = """
import tempfile
import jax
import numpy as np
import rjax
from helpers import digest

rjax.repro.deterministic()
rng = np.random.default_rng(0)
images = rng.standard_normal((16, 32, 32, 3)).astype(np.float16)
labels = rng.integers(0, 10, 16)
config = rjax.Config(
    ema=rjax.Ema(0.9), learning_rate=0.05, scaling=rjax.scaling.halving(init=2.0**36)
)
for name, model in {
    "mlp": rjax.nn.MLP((32, 16), num_classes=10),
    "cnn": rjax.nn.CNN(num_classes=10, width=8),
    "resnet": rjax.nn.ResNet50(num_classes=10, blocks=(1, 1), width=16),
}.items():
    variables = jax.jit(model.init)(jax.random.key(0), images[:1].astype(np.float32))
    stats = variables.get("batch_stats", {})
    plan = rjax.make_plan(variables["params"], config, batch_stats=stats)
    loss_fn = rjax.linen_loss(model, rjax.ops.softmax_cross_entropy)
    step = rjax.make_train_step(loss_fn, plan)
    fresh = lambda: rjax.init_state(plan, variables["params"], stats)
    captured = rjax.capture(step, fresh(), (images, labels))
    captured.assert_static()
    with tempfile.TemporaryDirectory() as folder:
        loaded = rjax.load_captured(captured.save(folder + "/step.rjax"), plan)
    found = []
    for run in (jax.jit(step, donate_argnums=0), captured, loaded):
        state = fresh()
        for _ in range(25):
            state, report = run(state, (images, labels))
        found.append(digest(state))
    applied, stages = int(state.applied_steps), captured.stages()
    print(name, len(set(found)), 0 < applied < 25, stages.kernels > 0)
"""


@pytest.mark.gpu
def test_jitted_captured_and_reloaded_have_the_same_bits():
    said = fresh_process(SCRIPT, JAX_PLATFORMS="cuda")
    assert said.splitlines() == [f"{n} 1 True True" for n in ("mlp", "cnn", "resnet")]
