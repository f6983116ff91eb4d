"""What `deterministic` asks of XLA, and what two processes then have in common."""

import pytest
from helpers import fresh_process

from rjax import repro
from rjax.repro import deterministic
from rjax.xla_flags import has_started

FLAG = "--xla_gpu_deterministic_ops"


def test_it_sets_the_flag_and_keeps_the_others(monkeypatch):
    monkeypatch.setattr("rjax.xla_flags.has_started", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    import os

    deterministic()
    assert os.environ["XLA_FLAGS"] == f"--xla_a=1 {FLAG}=true"
    deterministic()
    assert os.environ["XLA_FLAGS"].count(FLAG) == 1


@pytest.mark.parametrize("value", ["", "=true", "=1"])
def test_a_flag_that_is_there_is_enough(monkeypatch, value):
    monkeypatch.setenv("XLA_FLAGS", FLAG + value)
    deterministic()


def test_the_contrary_is_refused(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{FLAG}=false")
    with pytest.raises(RuntimeError, match="XLA_FLAGS holds .*=false; remove it"):
        deterministic()


def test_too_late_is_said_where_it_matters(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr("rjax.xla_flags.has_started", lambda: True)
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with pytest.raises(RuntimeError, match="comes too late: JAX has started"):
        deterministic()
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    deterministic()


def test_importing_rjax_and_its_command_line_starts_nothing():
    script = (
        "import rjax, rjax.cli, jax; from rjax.xla_flags import has_started; "
        "print(has_started()); jax.devices(); print(has_started())"
    )
    assert fresh_process(script).split() == ["False", "True"]


def test_here_jax_has_started():
    import jax

    jax.devices()
    assert has_started()


TRAIN = """
import jax
import rjax

rjax.repro.deterministic()
digits = rjax.data.load_digits()
config = rjax.Config(
    ema=rjax.Ema(0.9), learning_rate=0.05, scaling=rjax.scaling.halving(init=2.0**36)
)
for name, model in {{
    "mlp": rjax.nn.MLP((32, 16), num_classes=10),
    "cnn": rjax.nn.CNN(num_classes=10, width=4),
    "resnet": rjax.nn.ResNet(num_classes=10, blocks=1, width=4),
}}.items():
    variables = jax.jit(model.init)(jax.random.key(0), digits.train[0][:1])
    stats = variables.get("batch_stats", {{}})
    plan = rjax.make_plan(variables["params"], config, batch_stats=stats)
    loss_fn = rjax.linen_loss(model, rjax.ops.softmax_cross_entropy)
    step = jax.jit(rjax.make_train_step(loss_fn, plan), donate_argnums=0)
    state = rjax.init_state(plan, variables["params"], stats)
    with rjax.repro.record({folder!r} + "/" + name, plan, state, every=5) as recording:
        for batch in rjax.data.train_batches(digits.train, 16, seed=0, stop=55):
            state, report = step(state, batch)
            recording.add(state, report)
    assert 0 < int(state.skipped) < 50
"""


@pytest.mark.slow
def test_two_processes_leave_the_same_records(tmp_path):
    """Every model here, for 55 steps, of which the first ones overflow."""
    for name in ("a", "b"):
        fresh_process(TRAIN.format(folder=str(tmp_path / name)))
    for model in ("mlp", "cnn", "resnet"):
        found = repro.compare(tmp_path / "a" / model, tmp_path / "b" / model)
        assert found.verdict == "bit-identical", found.text()
        assert found.compared == (55, 12)
