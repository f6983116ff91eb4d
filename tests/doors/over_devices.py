"""The helpers for loops of one's own on two devices; run in a process of its own."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

import rjax

MESH = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
EACH, SAME = PartitionSpec("data"), PartitionSpec()
SCALING = rjax.LossScale.init()


def step(
    w, scaling, x, check, axis="data", gate_axis="data", inside=False, drift=False
):
    """Take one step by the gradient of `sum(w * x)` of this device."""
    x, check = x.reshape(1, 1), check.reshape(())

    def loss(w, x):
        found = jnp.sum(w.astype(jnp.float32) * x / 8192.0)
        return lax.pmean(found, "data") if inside else found

    half = w.astype(jnp.float16)
    _, grads = rjax.scaled_value_and_grad(loss, scaling, axis_name=axis)(half, x)
    return rjax.apply_gated(
        lambda g, w: w - g * (x if drift else 8192.0),
        scaling,
        grads,
        w,
        check=check,
        axis_name=gate_axis,
    )


def over_mesh(check_vma, **options):
    """Return the step over both devices, all of whose results agree."""
    mapped = jax.shard_map(
        functools.partial(step, **options),
        mesh=MESH,
        in_specs=(SAME, SAME, EACH, EACH),
        out_specs=SAME,
        check_vma=check_vma,
    )
    return jax.jit(mapped)


def over_pmap(w, scaling, x, check):
    """Take the same step by `pmap`; return what the first device has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the future of pmap
        mapped = jax.pmap(step, axis_name="data", in_axes=(None, None, 0, 0))
        found = mapped(w, scaling, x, check)
    for leaf in jax.tree.leaves(found):
        np.testing.assert_array_equal(leaf[0], leaf[1])
    return jax.tree.map(lambda x: x[0], found)


def decide(run):
    """Check what both devices make of gradients that one or both of them have."""
    w = jnp.full((1, 1), 3.0)
    fine = jnp.zeros(2)
    # Both have 40000, times the scale: a sum in half precision would be infinite.
    new, scaling, applied = run(w, SCALING, jnp.full(2, 40000.0), fine)
    assert applied and float(new[0, 0]) == 3.0 - 40000.0
    assert float(scaling.scale) == 8192.0
    # A mean, not a sum.
    new, _, _ = run(w, SCALING, jnp.array([1.0, 3.0]), fine)
    assert float(new[0, 0]) == 3.0 - 2.0
    for bad in (np.nan, np.inf):
        x, check = jnp.array([1.0, bad]), jnp.array([0.0, bad])
        for arguments in ((x, fine), (jnp.ones(2), check)):
            new, scaling, applied = run(w, SCALING, *arguments)
            assert not applied and float(new[0, 0]) == 3.0
            assert float(scaling.scale) == 4096.0


def refused(match, **options):
    """Check that a step whose devices would part is told so."""
    try:
        over_mesh(True, **options)(jnp.ones((1, 1)), SCALING, jnp.ones(2), jnp.zeros(2))
    except ValueError as error:
        assert match in str(error), error
    else:
        raise AssertionError(f"{options} went through")


def dense_is_averaged():
    """Check that float32 weight gradients are averaged, and once."""

    def run(kernel, x):
        def loss(kernel, x):
            return rjax.ops.dense(x, kernel).astype(jnp.float32).sum()

        scaling = rjax.LossScale.init(rjax.scaling.off())
        differentiate = rjax.scaled_value_and_grad(loss, scaling, axis_name="data")
        value, grads = differentiate(kernel, x)
        return lax.pmean(value, "data"), grads

    for check_vma in (True, False):
        mapped = jax.shard_map(
            run, mesh=MESH, in_specs=(SAME, EACH), out_specs=SAME, check_vma=check_vma
        )
        x = jnp.concatenate([jnp.ones(2049), jnp.full(2049, 2.0)]).astype(jnp.float16)
        value, grads = jax.jit(mapped)(jnp.ones((1, 1), jnp.float16), x[:, None])
        assert float(grads[0, 0]) == 2049 * 1.5, grads
        assert float(value) == 2049 * 1.5


def main():
    """Check everything and say so."""
    assert jax.device_count() == 2
    decide(over_mesh(True))
    decide(over_mesh(False))
    decide(over_pmap)
    refused("is the same on all devices along ['data']", gate_axis=None)
    refused("pass `axis_name`, so that gradients are averaged", axis=None)
    refused("would come to differ over devices along ['data']", drift=True)
    refused("it is the same along ['data']; average it outside", inside=True)
    dense_is_averaged()
    print("done")
