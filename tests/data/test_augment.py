"""What holds for every augmentation: purity, dtypes, composition, messages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits, fresh_process
from jax import lax

from rjax.data import augment
from rjax.data.augment import (
    Chain,
    ColorJitter,
    Normalize,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomScale,
)

SHAPE = (6, 8, 8, 3)
EVERY = [
    RandomCrop(pad=2),
    RandomHorizontalFlip(),
    RandomAffine(20, (0.8, 1.2), 0.1),
    RandomRotation(20),
    RandomScale((0.8, 1.2)),
    RandomResizedCrop(8),
    RandomErasing(area=(0.1, 0.4)),
    ColorJitter(0.4, 0.4, 0.4, 0.1),
]
HALVED = Normalize.preset("cifar10", jnp.float16)
DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.uint8]
KEY, OTHER = jax.random.key(7), jax.random.key(8)


def _names(changes):
    return [type(change).__name__ for change in changes]


def _images(dtype=jnp.float32, shape=SHAPE):
    x = np.random.default_rng(0).random(shape)
    return jnp.asarray(np.round(x * 255) if dtype == jnp.uint8 else x, dtype)


every = pytest.mark.parametrize("change", EVERY, ids=_names(EVERY))


@functools.partial(jax.jit, static_argnums=(0, 2))
def _draw(changes, key, shape):
    return [change.draw(key, shape) for change in changes]


@every
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_and_shape_are_kept(change, dtype):
    images = jax.ShapeDtypeStruct(SHAPE, dtype)
    assert jax.eval_shape(change, KEY, images).update(weak_type=False) == images
    assert jax.eval_shape(change, KEY, images.update(shape=(0, *SHAPE[1:]))).size == 0


@every
def test_the_same_key_gives_the_same_bits(change):
    images = _images()
    got = change(KEY, images)
    assert bits(got) == bits(change(KEY, images)) != bits(images)
    assert bits(got) != bits(change(OTHER, images))


def test_draws_do_not_depend_on_the_number_of_images():
    changes = (RandomAffine(20), RandomHorizontalFlip())
    few = _draw(changes, KEY, SHAPE)
    many = _draw(changes, KEY, (2 * SHAPE[0], *SHAPE[1:]))
    jax.tree.map(
        lambda one, other: np.testing.assert_array_equal(one, other[: len(one)]),
        few,
        many,
    )


@every
def test_options_compare_by_value_and_print(change, compilations):
    change(KEY, _images())
    compilations.clear()
    twin = dataclasses.replace(change)
    assert twin == change and hash(twin) == hash(change) and twin is not change
    twin(KEY, _images())
    assert not compilations
    assert eval(repr(change), dict(vars(augment))) == change


def test_a_chain_is_its_steps_one_by_one():
    first = Chain(*EVERY[:2])
    images = want = _images()
    for index, step in enumerate(first.steps):
        want = step(jax.random.fold_in(KEY, index), want)
    assert bits(first(KEY, images)) == bits(want) != bits(images)
    # A step more, and all of it jitted: those before it do not notice.
    got = jax.jit(Chain(*first.steps, HALVED))(KEY, images)
    assert got.dtype == jnp.float16
    assert bits(got) == bits(jax.jit(HALVED)(None, want))
    inner = first(jax.random.fold_in(KEY, 0), images)
    assert bits(Chain(first)(KEY, images)) == bits(inner)
    assert bits(Chain()(KEY, images)) == bits(images)


def test_within_a_scan(compilations):
    images, change = _images(jnp.float16), RandomAffine(20)

    @jax.jit
    def epoch(key, images):
        def step(total, index):
            changed = change(jax.random.fold_in(key, index), images)
            return total + changed.astype(jnp.float32).mean(), changed

        return lax.scan(step, jnp.float32(0), jnp.arange(2))

    _, changed = epoch(KEY, images)
    compilations.clear()
    epoch(OTHER, images)
    assert not compilations
    assert changed.shape == (2, *SHAPE) and changed.dtype == jnp.float16
    alone = change(jax.random.fold_in(KEY, 1), images)
    np.testing.assert_allclose(changed[1], alone, rtol=0, atol=2**-10)


def test_draws_are_pinned():
    # Runs of different machines and versions must agree.
    [drawn] = _draw((RandomCrop(pad=4),), jax.random.key(0), (3, 32, 32, 3))
    assert drawn["corners"].tolist() == [[4, 4], [-2, 0], [1, -3]]


def test_images_spread_over_devices():
    assert fresh_process(SPREAD, XLA_FLAGS=TWO_DEVICES) == "done"


TWO_DEVICES = "--xla_force_host_platform_device_count=2"
SPREAD = """
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from rjax.data.augment import RandomCrop

change, key = RandomCrop(2), jax.random.key(0)
images = jax.random.uniform(jax.random.key(1), (4, 6, 6, 3))
want = jax.device_get(change(key, images))
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    rows = NamedSharding(mesh, P("data"))
    spread = jax.device_put(images, rows)
    program = jax.jit(change, out_shardings=rows).lower(key, spread).compile()
    assert (jax.device_get(program(key, spread)) == want).all()
    assert "all-gather(" not in program.as_text()

def apart(key, images):
    return change(jax.random.fold_in(key, jax.lax.axis_index("data")), images)

apart = jax.shard_map(
    apart, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
)
got = jax.device_get(jax.jit(apart)(key, spread))
second = jax.device_get(change(jax.random.fold_in(key, 1), images[2:]))
assert (got[2:] == second).all()
print("done")
"""


# Wrong types are what some of these are about.
# pyright: reportArgumentType=false
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RandomCrop(pad=-1), "`pad` must be a whole number of at least 0, got"),
        (lambda: RandomCrop(pad=1.5), "`pad` must be a whole number .* got 1.5"),
        (lambda: RandomCrop(size=0), "`size` must be a whole number of at least 1"),
        (lambda: RandomCrop(size=(1, 2, 3)), "`size` must be .* a tuple"),
        (lambda: RandomCrop(1, 11)(KEY, _images()), r"fit .* \(11, 11\) for \(10, 10"),
        (lambda: RandomCrop(fill=np.nan), "`fill` must be a finite number"),
        (lambda: RandomCrop(fill=()), "`fill` must be a finite number"),
        (lambda: RandomCrop(1, fill=(0.0, 1.0))(KEY, _images()), "got 2 for 3 channel"),
        (lambda: RandomCrop(1, fill=0.5)(KEY, _images(jnp.uint8)), "whole, in .* uint"),
        (lambda: RandomHorizontalFlip(1.5), "`probability` must be .* at most 1, got"),
        (lambda: RandomHorizontalFlip(True), "`probability` must be a number"),
        (lambda: RandomErasing(-0.1), "`probability` must be a number of at least 0"),
        (lambda: RandomErasing(area=(0.5, 0.2)), "`area` must be a tuple .* low <= hi"),
        (lambda: RandomErasing(area=(0.0, 0.2)), r"`area` must lie in \(0, 1\], got"),
        (lambda: RandomErasing(aspect=(0.0, 2.0)), r"`aspect` must lie in \(0, inf\)"),
        (lambda: RandomErasing(value="x"), "`value` must be a finite number"),
        (lambda: RandomResizedCrop(8, area=(0.5, 1.5)), r"`area` must lie in \(0, 1\]"),
        (lambda: RandomResizedCrop(8, aspect=1.0), "`aspect` must be a tuple"),
        (lambda: RandomResizedCrop(8, area=[0.5, 1]), r"tuple .* got \[0.5, 1\]"),
        (lambda: RandomResizedCrop("8"), "`size` must be a whole number"),
        (lambda: RandomRotation(-5), "`degrees` must be a number of at least 0, got -"),
        (lambda: RandomRotation((5, -5)), "`degrees` must be a tuple .* low <= high"),
        (lambda: RandomRotation(np.inf), "`degrees` must be a tuple .* finite"),
        (lambda: RandomScale((0.0, 1.0)), r"`scale` must lie in \(0, inf\), got"),
        (lambda: RandomScale((1.0, np.inf)), "`scale` must be a tuple .* finite"),
        (lambda: RandomAffine(translate=1.5), "`translate` must be .* at most 1, got"),
        (lambda: RandomAffine(translate=(0, 0, 0)), "`translate` must be a number or"),
        (lambda: ColorJitter(brightness=-1), "`brightness` must be a number of at lea"),
        (lambda: ColorJitter(contrast=(-1, 1)), r"`contrast` must lie in \[0, inf\)"),
        (lambda: ColorJitter(hue=0.6), "`hue` must be .* at most 0.5, got 0.6"),
        (lambda: ColorJitter(hue=(-0.6, 0)), r"`hue` must lie in \[-0.5, 0.5\]"),
        (lambda: ColorJitter(0.1)(KEY, jnp.ones((1, 2, 2, 1))), "must have 3 channels"),
        (lambda: Normalize(0.5, 0.0), "`std` must be above 0, got 0.0"),
        (lambda: Normalize("mnist", 1.0), "`mean` must be a finite number"),
        (lambda: Normalize(0.5, 0.5, jnp.uint8), "`dtype` must be float16, .* uint8"),
        (lambda: Normalize(0.5, 0.5, "16 bits"), "`dtype` must be float16, .* got 16"),
        (lambda: Normalize.preset("svhn"), "`name` must be one of 'mnist', .* 'svhn'"),
        (lambda: Normalize.preset("mnist")(KEY, _images()), "`mean` .* got 1 for 3"),
        (lambda: Chain([RandomCrop(1)]), "step 0 of a Chain must be .* list"),
        (lambda: HALVED(KEY, _images()[0]), r"`images` must have the axes .*\(8, 8"),
        (lambda: HALVED(KEY, _images().astype(jnp.int32)), "`images` must be float16"),
        (lambda: HALVED(KEY, jnp.ones((2, 0, 8, 3))), "`images` must have pixels"),
        (lambda: augment.crop(_images(), jnp.ones((6, 2)), 4), "like int32, got float"),
        (lambda: augment.horizontal_flip(_images(), jnp.ones(6)), "like bool, got flo"),
        (lambda: augment.affine(_images(), jnp.ones(5)), r"one row per image.*\(6,"),
        (lambda: augment.erase(_images(), jnp.ones((6, 3), jnp.int32)), r"\(6, 4\), g"),
    ],
)  # fmt: skip
def test_wrong_options(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
