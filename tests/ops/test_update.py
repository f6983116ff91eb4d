"""The fused update: every implementation moves all arenas by the formulas, or none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64_reference import CASES, LR, Rounded, Slot, exact
from ops.range_kernels import (
    BLOCK,
    Runner,
    implementations,
    lowers_for_cuda,
    needs_kernels,
    refuses_where_there_is_none,
)
from ops.range_kernels import run as run  # a fixture

from rjax.ops import fused_update, update
from rjax.ops.slots import ROW, SlotTable
from rjax.ops.update import AdamRule, Arenas, SgdRule

SCALE, COUNT, DECAY = 2.0**13, 7, 0.9
# Bias-like slots first: shorter than a block, a block, ragged, and longer than that.
ROWS = (1, 3, BLOCK // ROW, 7, 1, 5)
BIAS_LIKE = 2
NESTEROV = SgdRule(0.9, True, 0.02)


def slots(rows=ROWS, bias_like=BIAS_LIKE, decay=None):
    marks = tuple(i >= bias_like for i in range(len(rows)))
    return SlotTable(rows, marks if decay is None else decay, marks)


def normal(n, seed):
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


def arenas(rule, table=None, bias_like=BIAS_LIKE, half=jnp.float16, ema=True):
    """Return arenas of normal numbers, and gradients times the scale."""
    table = slots() if table is None else table
    n = table.num_rows * ROW
    start = int(table.row_starts[bias_like]) * ROW
    w, e = (jnp.asarray(normal(n, seed)) for seed in (0, 1))
    copies = (None, None) if half is None else (w[start:].astype(half), e[start:])
    moved = Arenas(
        master=w,
        compute=copies[0],
        mu=jnp.asarray(normal(n, 2)) if rule.has_mu else None,
        nu=jnp.asarray(normal(n, 3) ** 2) if rule.has_nu else None,
        ema=e if ema else None,
        ema_compute=None if half is None or not ema else copies[1].astype(half),
    )
    return moved, jnp.asarray(normal(n, 4)) * np.float32(SCALE)


def call(run, rule, old, grads, table=None, skip=None, **options):
    """Run the fused update; a norm for a clip is an array, as in a step."""
    norm, options["table"] = options.pop("norm", None), table or slots()
    decay = None if old.ema is None else DECAY

    def op(old, grads, skip, norm, implementation):
        return fused_update(
            rule, old, grads, skip=skip, norm=norm, scale=jnp.float32(SCALE),
            learning_rate=jnp.float32(LR), count=jnp.int32(COUNT), ema_decay=decay,
            implementation=implementation, **options,
        )  # fmt: skip

    flag = None if skip is None else jnp.bool_(skip)
    return run(op, old, grads, flag, None if norm is None else jnp.float32(norm))


def leaves(arenas):
    return {k: np.asarray(x) for k, x in arenas._asdict().items() if x is not None}


def bits(x):
    return np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")


def same_bits(a, b):
    a, b = leaves(a), leaves(b)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(bits(a[name]), bits(b[name]), err_msg=name)


def near(found, wanted: Rounded, name):
    error = np.abs(np.asarray(found, np.float64) - wanted.value)
    assert np.all(error <= wanted.bound), (name, (error / wanted.bound).max())


def follows_float64(name, old, new, u, table):
    """Compare slot by slot with the formulas in float64."""
    rule, formula = CASES[name]
    for i, marked in enumerate(table.decay):
        where = slice(*(int(r) * ROW for r in table.row_starts[i : i + 2]))
        w, m, v = (
            exact(np.zeros(1) if x is None else np.asarray(x)[where])
            for x in (old.master, old.mu, old.nu)
        )
        slot = Slot(w, m, v, rule.weight_decay if marked else 0.0, not marked)
        pull = Rounded(u.value[where], u.bound[where])
        slot = formula(slot, pull, exact(np.float32(LR)), COUNT)
        near(new.master[where], slot.w, f"master of slot {i}")
        if rule.has_mu:
            near(new.mu[where], slot.m, f"mu of slot {i}")
        if rule.has_nu:
            near(new.nu[where], slot.v, f"nu of slot {i}")
        if old.ema is not None:
            average = exact(np.asarray(old.ema)[where])
            step = exact(np.float32(1 - DECAY)) * (slot.w - average)
            near(new.ema[where], average + step, f"ema of slot {i}")


def copies_are_casts(new):
    for name, source in (("compute", new.master), ("ema_compute", new.ema)):
        copy = getattr(new, name)
        if copy is not None:
            wanted = source[source.size - copy.size :].astype(copy.dtype)
            np.testing.assert_array_equal(bits(copy), bits(wanted))


CLIPS = {
    "no clip": {},
    "value": {"clip_value": 0.5},
    "norm": {"clip_norm": 2.0, "norm": 40.0},
    "small norm": {"clip_norm": 2.0, "norm": 1.0},
}


def clipped(grads, clip_value=None, clip_norm=None, norm=None):
    u = exact(np.asarray(grads, np.float64) / SCALE)
    if clip_value is not None:
        return exact(np.clip(u.value, -clip_value, clip_value))
    return u if norm is None else u * Rounded.of(min(1.0, clip_norm / norm))


@implementations
class TestFusedUpdate:
    @pytest.mark.parametrize("name", CASES)
    def test_every_rule_follows_float64(self, run, name):
        rule = CASES[name][0]
        old, grads = arenas(rule)
        new = call(run, rule, old, grads)
        follows_float64(name, old, new, clipped(grads), slots())
        copies_are_casts(new)
        if run.target == "device" and run.kernel and "lars" not in name:
            # Promised: XLA on GPU contracts no product with a sum, nor does the kernel.
            same_bits(new, call(Runner("xla"), rule, old, grads))

    @pytest.mark.parametrize(
        ("name", "clip"),
        [*(("nesterov coupled", clip) for clip in CLIPS), ("lars", "norm")],
    )
    def test_it_unscales_and_clips(self, run, name, clip):
        old, grads = arenas(CASES[name][0])
        new = call(run, CASES[name][0], old, grads, **CLIPS[clip])
        follows_float64(name, old, new, clipped(grads, **CLIPS[clip]), slots())

    @pytest.mark.parametrize(
        ("rows", "bias_like"),
        [
            ((1,), 0),
            ((BLOCK // ROW,), 0),
            ((BLOCK // ROW + 1,), 0),
            ((3 * BLOCK // ROW + 1, 40), 1),
            ((2, 3), 2),  # no slot has a copy
        ],
    )
    def test_lengths_around_a_block(self, run, rows, bias_like):
        table = slots(rows, bias_like)
        old, grads = arenas(NESTEROV, table, bias_like)
        new = call(run, NESTEROV, old, grads, table)
        follows_float64("nesterov", old, new, clipped(grads), table)
        copies_are_casts(new)

    def test_slots_that_decay_or_not_as_they_like(self, run):
        rows = tuple(1 + i % 3 for i in range(24))
        table = slots(rows, decay=tuple(i % 2 == 1 for i in range(24)))
        old, grads = arenas(NESTEROV, table)
        new = call(run, NESTEROV, old, grads, table)
        follows_float64("nesterov", old, new, clipped(grads), table)

    @pytest.mark.parametrize("half", [None, jnp.bfloat16], ids=["fp32", "bf16"])
    def test_other_precisions(self, run, half):
        old, grads = arenas(NESTEROV, half=half)
        new = call(run, NESTEROV, old, grads)
        assert (new.compute is None) == (half is None)
        follows_float64("nesterov", old, new, clipped(grads), slots())
        copies_are_casts(new)

    def test_without_an_average(self, run):
        rule = CASES["adamw"][0]
        old, grads = arenas(rule, ema=False)
        new = call(run, rule, old, grads)
        assert new.ema is None and new.ema_compute is None
        follows_float64("adamw", old, new, clipped(grads), slots())

    @pytest.mark.parametrize("skip", [False, True])
    def test_the_flag_decides(self, run, skip):
        old, grads = arenas(NESTEROV)
        new = call(run, NESTEROV, old, grads, skip=skip)
        if skip:
            same_bits(new, old)
        else:
            follows_float64("nesterov", old, new, clipped(grads), slots())
            copies_are_casts(new)

    def test_a_skip_keeps_every_bit_whatever_the_gradient(self, run):
        old, grads = arenas(NESTEROV)
        odd = [np.nan, -np.nan, np.inf, -0.0, 1e-45, 6e4]
        planted = {
            name: jnp.asarray(x).at[jnp.arange(6) * 90].set(np.asarray(odd, x.dtype))
            for name, x in leaves(old).items()
        }
        old = old._replace(**planted)
        for value in (np.nan, np.inf, 0.0):
            new = call(run, NESTEROV, old, grads * 0 + value, skip=True)
            same_bits(new, old)

    def test_a_bad_gradient_moves_its_own_element_only(self, run):
        old, grads = arenas(NESTEROV)
        at = grads.size - 1
        new = call(run, NESTEROV, old, grads.at[at].set(jnp.nan))
        clean = call(run, NESTEROV, old, grads)
        for name, found in leaves(new).items():
            wanted = leaves(clean)[name]
            assert np.isnan(found[-1]), name
            np.testing.assert_array_equal(bits(found[:-1]), bits(wanted[:-1]))

    def test_zero_stays_zero(self, run):
        for rule in (NESTEROV, CASES["adam"][0], CASES["lars"][0]):
            old, grads = jax.tree.map(jnp.zeros_like, arenas(rule))
            for name, found in leaves(call(run, rule, old, grads)).items():
                assert not bits(found).any(), name

    def test_an_overflow_of_the_copy_is_infinite(self, run):
        old, grads = arenas(SgdRule(), ema=False)
        old = old._replace(master=jnp.full_like(old.master, 65519.0).at[-1].set(65520))
        new = call(run, SgdRule(), old, 0 * grads)
        copy = np.asarray(new.compute)
        assert np.isfinite(copy[:-1]).all() and copy[-1] == np.inf

    def test_the_arguments_keep_their_bits(self, run):
        old, grads = arenas(NESTEROV)
        before = jax.tree.map(np.array, old)
        call(run, NESTEROV, old, grads)
        same_bits(old, before)

    def test_twice_the_same_bits(self, run):
        rule = CASES["lars"][0]
        first, second = (call(run, rule, *arenas(rule)) for _ in range(2))
        same_bits(first, second)

    def test_the_update_alone_has_the_bits_of_the_fused_one(self, run):
        old, grads = arenas(NESTEROV, half=None, ema=False)
        u = grads / np.float32(SCALE)

        def op(master, u, mu, implementation):
            return update(
                NESTEROV, master, u, mu, None, learning_rate=jnp.float32(LR),
                count=jnp.int32(COUNT), table=slots(), implementation=implementation,
            )  # fmt: skip

        alone = run(op, old.master, u, old.mu)
        fused = call(run, NESTEROV, old, grads)
        np.testing.assert_array_equal(bits(alone.master), bits(fused.master))
        np.testing.assert_array_equal(bits(alone.mu), bits(fused.mu))


def cuda_op(rule, table, *args):
    old, grads, skip = args
    return fused_update(
        rule, old, grads, skip=skip, scale=jnp.float32(SCALE), ema_decay=0.999,
        learning_rate=jnp.float32(LR), count=jnp.int32(1), table=table,
        implementation="mosaic_gpu",
    )  # fmt: skip


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@needs_kernels
@pytest.mark.parametrize("name", ["sgd", "nesterov", "adamw", "lars nesterov"])
def test_the_kernel_lowers_for_cuda(name):
    rule = CASES[name][0]
    old, grads = arenas(rule)
    flag = jax.ShapeDtypeStruct((), jnp.bool_)
    op = functools.partial(cuda_op, rule, slots())
    lowers_for_cuda("rjax_update", op, shapes(old), shapes(grads), flag)


@needs_kernels
def test_the_kernel_moves_donated_arenas_in_place():
    from rjax.ops import mosaic

    old, grads = arenas(NESTEROV)
    op = functools.partial(cuda_op, NESTEROV, slots())
    with mosaic.mode("lower"):
        traced = jax.jit(op, donate_argnums=0).trace(old, grads, jnp.bool_(False))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("#stablehlo.output_operand_alias") == len(jax.tree.leaves(old))


RULE = AdamRule()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda old: old._replace(master=old.master[:-1]), r"`master` must be float32"),
        (lambda old: old._replace(mu=None), r"`mu` must be an arena for AdamRule"),
        (
            lambda old: old._replace(nu=old.nu[:128]),
            "`nu` must be float32.* got float32.128",
        ),
        (lambda old: old._replace(ema=None), r"`ema_decay` and `arenas.ema` go toge"),
        (
            lambda old: old._replace(compute=old.compute[1:]),
            "must be half-precision copies of the same last slots",
        ),
        (
            lambda old: old._replace(compute=old.compute.astype(jnp.bfloat16)),
            "must be half-precision copies of the same last slots",
        ),
    ],
)
def test_arenas_that_do_not_fit_are_refused(change, message):
    old, grads = arenas(RULE)
    with pytest.raises(ValueError, match=message):
        fused_update(
            RULE, change(old), grads, scale=jnp.float32(1), count=jnp.int32(1),
            learning_rate=jnp.float32(1), table=slots(), ema_decay=0.9,
        )  # fmt: skip


def test_a_norm_without_a_bound_is_refused():
    old, grads = arenas(RULE)
    with pytest.raises(ValueError, match="`norm` and `clip_norm` go together"):
        fused_update(
            RULE, old, grads, scale=jnp.float32(1), count=jnp.int32(1), clip_norm=1.0,
            learning_rate=jnp.float32(1), table=slots(), ema_decay=0.9,
        )  # fmt: skip


def test_more_than_31_bits_of_elements_are_refused_before_allocation():
    rows = 2**31 // ROW
    table = SlotTable((rows,), (True,), (True,))
    w, scalar = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows * ROW,), ()))
    op = functools.partial(fused_update, SgdRule(), count=jnp.int32(1), table=table)
    with pytest.raises(ValueError, match="`master` must have at most 2\\^31 - 1"):
        jax.eval_shape(
            lambda w, s: op(Arenas(w), w, scale=s, learning_rate=s), w, scalar
        )


def test_where_no_kernel_can_run():
    old, grads = arenas(SgdRule(), half=None, ema=False)

    def op(w, implementation):
        return fused_update(
            SgdRule(), Arenas(w), grads, scale=jnp.float32(1), count=jnp.int32(1),
            learning_rate=jnp.float32(1), table=slots(), implementation=implementation,
        )  # fmt: skip

    refuses_where_there_is_none(op, old.master)


@needs_kernels
@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30])
def test_slot_norms_follow_float64(size):
    """Squares beyond float32 and slots longer than a chunk included."""
    from rjax.ops import mosaic
    from rjax.ops.update import base, mosaic_norms

    table = slots((1, 7, 3 * BLOCK // ROW))
    n = table.num_rows * ROW
    w, g = (jnp.asarray(normal(n, seed)) * np.float32(size) for seed in (0, 1))
    numbers = jnp.array([4.0, 1.0, 0.5], jnp.float32)
    options = base.Options(clip_norm=1.0)

    def op(w, g, numbers):
        return mosaic_norms.slot_norms(w, g, numbers, table, options)

    with pytest.MonkeyPatch.context() as patch, mosaic.mode("interpret", BLOCK):
        patch.setattr(mosaic_norms, "_CHUNK", 2 * BLOCK)
        patch.setattr(mosaic_norms, "_BLOCK", BLOCK)
        found = jax.jit(op)(w, g, numbers)
    for norms, x, factor in zip(found, (w, g), (1.0, 0.125), strict=True):
        for i in range(3):
            where = slice(*(int(r) * ROW for r in table.row_starts[i : i + 2]))
            wanted = np.linalg.norm(np.asarray(x[where], np.float64)) * factor
            wanted = 0.0 if size == 1e-30 else wanted  # as the base: the ratio is 1
            np.testing.assert_allclose(norms[i], wanted, rtol=64 * 2.0**-24)
