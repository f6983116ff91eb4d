"""Which implementation serves: what was named, what was measured, what can follow."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.range_kernels import needs_kernels
from ops.test_update import ROWS, SCALE, arenas, same_bits, slots

from rjax import ops
from rjax.ops import mosaic, tuned
from rjax.ops.check_finite import check_finite, nonfinite_slots
from rjax.ops.dispatch import choose, resolve
from rjax.ops.update import SgdRule, fused_implementation

BOTH = {"xla": lambda x: x, "mosaic_gpu": lambda x: -x}
NESTEROV = SgdRule(0.9, True, 0.02)


@contextlib.contextmanager
def measured(monkeypatch, faster):
    """Pretend that the kernel was measured to be the faster one, or the slower."""
    with monkeypatch.context() as patch, mosaic.mode("interpret", 256):
        patch.setattr(tuned, "prefers_kernel", lambda op, n: faster)
        yield


def test_a_name_decides():
    assert resolve("op", "xla", BOTH)(2) == 2
    assert resolve("op", "mosaic_gpu", BOTH)(2) == -2


@pytest.mark.parametrize("faster", [False, True])
def test_without_a_name_the_measurement_decides(monkeypatch, faster):
    with measured(monkeypatch, faster):
        name = choose("op", None, BOTH, ("op", 1000))
        assert name == ("mosaic_gpu" if faster else "xla")
        found = resolve("op", None, BOTH, ("op", 1000))(jnp.float32(2))
        assert float(found) == (-2 if faster else 2)


def test_what_was_not_measured_is_left_to_xla(monkeypatch):
    with measured(monkeypatch, True):
        assert choose("op", None, BOTH) == "xla"
        assert choose("op", None, {"xla": abs}, ("op", 1000)) == "xla"
        why = {"xla": abs, "mosaic_gpu": "it is Monday"}
        assert choose("op", None, why, ("op", 1000)) == "xla"


def test_words_for_what_is_missing():
    with pytest.raises(ValueError, match="`implementation` must be None or one of"):
        choose("op", "triton", BOTH)
    why = {"xla": abs, "mosaic_gpu": "it is Monday"}
    with pytest.raises(NotImplementedError, match="`op` has no 'mosaic_gpu' .* Monday"):
        choose("op", "mosaic_gpu", why)
    with pytest.raises(NotImplementedError, match="there is none"):
        choose("op", "mosaic_gpu", {"xla": abs})


def test_here_nothing_was_measured():
    if jax.default_backend() == "gpu":
        pytest.skip("a table may be there")
    assert not tuned.prefers_kernel("cast/32-16", 1 << 20)
    assert tuned.block("cast/32-16", 1 << 20) is None


def in_program(f, *args):
    """Return which kernels the program of a function runs."""
    text = str(jax.make_jaxpr(f)(*args))
    names = ("cast", "ema", "check_finite", "nonfinite_slots", "digest", "update")
    return {name for name in names if f"rjax_{name}" in text}


@needs_kernels
class TestAChosenKernel:
    """What XLA can do with an op does not depend on who was chosen to serve it."""

    @pytest.fixture(autouse=True)
    def chosen(self, monkeypatch):
        with measured(monkeypatch, True):
            yield

    @pytest.mark.parametrize(
        ("name", "op", "count"),
        [
            ("cast", lambda x: ops.cast(x, jnp.float16), 1),
            ("ema", lambda x, y: ops.ema(x, y, 0.5), 2),
            ("check_finite", lambda x: check_finite(x, jnp.float32(8)), 1),
            ("digest", ops.digest, 1),
            ("digest", lambda x: ops.digest_slots(x, [(0, 200), (256, 100)]), 1),
        ],
    )
    def test_it_is_batched_as_xla_is(self, name, op, count):
        rows = np.random.default_rng(0).normal(size=(count, 3, 384))
        rows = [jnp.asarray(x, jnp.float32) for x in rows]
        assert in_program(op, *(x[0] for x in rows)) == {name}
        assert in_program(jax.vmap(op), *rows) == set()
        batched = jax.jit(jax.vmap(op))(*rows)
        for i in range(3):
            alone = jax.jit(op)(*(x[i] for x in rows))
            for a, b in zip(
                jax.tree.leaves(batched), jax.tree.leaves(alone), strict=True
            ):
                np.testing.assert_allclose(
                    np.asarray(a[i], np.float64), np.asarray(b, np.float64), rtol=1e-6
                )

    def test_a_cast_is_differentiated_as_xla_is(self):
        x = jnp.linspace(-2, 2, 300)
        loss = lambda x: jnp.sum(ops.cast(x, jnp.float16).astype(jnp.float32) ** 2)  # noqa: E731
        wanted = 2 * x.astype(jnp.float16).astype(jnp.float32)
        np.testing.assert_allclose(jax.grad(loss)(x), wanted, rtol=1e-3)
        hessian = jax.vmap(jax.grad(loss))(jnp.stack([x, 2 * x]))
        np.testing.assert_allclose(hessian[1], 2 * wanted, rtol=1e-3)

    def test_the_fused_update_is_batched_as_xla_is(self):
        pairs = [arenas(NESTEROV) for _ in range(2)]
        pairs[1] = jax.tree.map(lambda x: x * 0.5, pairs[1])
        old, grads = jax.tree.map(lambda *x: jnp.stack(x), *pairs)
        flags = jnp.array([False, True])

        def op(old, grads, skip):
            return ops.fused_update(
                NESTEROV, old, grads, scale=jnp.float32(SCALE), count=jnp.int32(1),
                learning_rate=jnp.float32(0.1), table=slots(), skip=skip, ema_decay=0.9,
            )  # fmt: skip

        assert in_program(op, *pairs[0], flags[0]) == {"update"}
        assert in_program(jax.vmap(op), old, grads, flags) == set()
        new = jax.jit(jax.vmap(op))(old, grads, flags)
        same_bits(jax.tree.map(lambda x: x[1], new), pairs[1][0])
        wanted = jax.jit(op)(*pairs[0], flags[0])
        for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(wanted), strict=True):
            wide = (np.asarray(x, np.float32) for x in (a[0], b))
            np.testing.assert_allclose(*wide, rtol=2e-3, atol=1e-6)

    def test_it_serves_inside_scan_and_cond(self):
        def step(carry, flag):
            return jax.lax.cond(
                flag, lambda e: ops.ema(e, e + 1, 0.5), lambda e: e, carry
            ), None

        flags = jnp.array([True, False, True])
        found, _ = jax.jit(lambda x: jax.lax.scan(step, x, flags))(jnp.zeros(384))
        np.testing.assert_array_equal(np.asarray(found), 1.0)


@needs_kernels
def test_the_fused_update_says_what_it_will_run(monkeypatch):
    old, _ = arenas(NESTEROV)
    name = functools.partial(
        fused_implementation, NESTEROV, old, table=slots(), ema_decay=0.9
    )
    for faster in (False, True):
        with measured(monkeypatch, faster):
            assert name() == ("mosaic_gpu" if faster else "xla")
            assert name(implementation="xla") == "xla"
            assert name(implementation="mosaic_gpu") == "mosaic_gpu"


def test_slots_at_fault_are_named_only_if_wanted():
    table = slots()
    bad = jnp.zeros(sum(ROWS) * 128).at[-1].set(jnp.inf)
    found = nonfinite_slots(bad, table, wanted=jnp.bool_(True))
    assert found.tolist() == [False] * (len(ROWS) - 1) + [True]
    assert not nonfinite_slots(bad, table, wanted=jnp.bool_(False)).any()
