import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rjax
from rjax.regions import Role
from rjax.roles import default_role

FP32 = rjax.Config(precision="fp32", optimizer=rjax.optim.sgd(), learning_rate=0.5)


@pytest.mark.parametrize(
    ("path", "shape", "siblings", "role"),
    [
        ("BatchNorm_0/bias", (4,), ["scale"], Role.BN_BIAS),
        ("BatchNorm_0/scale", (4,), ["bias"], Role.BN_WEIGHT),
        ("anything/bias", (4,), ["scale"], Role.BN_BIAS),
        ("anything/beta", (4,), ["gamma"], Role.BN_BIAS),
        ("anything/gamma", (4,), ["beta"], Role.BN_WEIGHT),
        ("bn1/bias", (4,), [], Role.BN_BIAS),
        ("bn1/weight", (4,), ["bias"], Role.BN_WEIGHT),
        ("layer1.bn/weight", (4,), ["bias"], Role.BN_WEIGHT),
        ("ln_f/b", (4,), [], Role.BN_BIAS),
        ("ln_f/g", (4,), ["b"], Role.BN_WEIGHT),
        ("RMSNorm_0/scale", (4,), [], Role.BN_WEIGHT),
        ("GroupNorm_1/bias", (4,), ["scale"], Role.BN_BIAS),
        ("Dense_0/bias", (4,), ["kernel"], Role.FC_BIAS),
        ("Conv_0/bias", (4,), ["kernel"], Role.FC_BIAS),
        ("linear/b", (4,), ["w"], Role.FC_BIAS),
        ("cls_token", (7,), [], Role.FC_BIAS),
        ("temperature", (), [], Role.FC_BIAS),
        ("blnk/weight", (4,), [], Role.FC_BIAS),
        ("Dense_0/kernel", (3, 4), ["bias"], Role.FC_WEIGHT),
        ("Embed_0/embedding", (9, 4), [], Role.FC_WEIGHT),
        ("attention/query/kernel", (8, 2, 4), ["bias"], Role.FC_WEIGHT),
        ("Conv_0/kernel", (3, 3, 8, 8), ["bias"], Role.DEEP_CONV),
        ("Conv_0/kernel", (3, 3, 3, 8, 8), ["bias"], Role.DEEP_CONV),
        ("Conv_0/kernel", (3, 8, 8), ["bias"], Role.DEEP_CONV),
        ("w", (3, 3, 8, 8), [], Role.DEEP_CONV),
    ],
)
def test_default_roles(path, shape, siblings, role):
    names = [path.rpartition("/")[2], *siblings]
    assert default_role(path, shape, names) is role


def _roles(plan):
    return {slot.path: slot.role for slot in plan.slots}


def _struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("shape", "role"),
    [
        ((3, 3, 1, 8), Role.FIRST_CONV),
        ((7, 7, 4, 8), Role.FIRST_CONV),
        ((3, 3, 5, 8), Role.DEEP_CONV),
        ((3, 3, 3, 3, 8), Role.DEEP_CONV),
    ],
)
def test_without_an_example_few_channels_mean_the_input(shape, role):
    plan = rjax.make_plan({"conv": {"kernel": _struct(*shape)}}, FP32)
    assert _roles(plan) == {"conv/kernel": role}


PARAMS = {
    "deep": {"kernel": np.full((3, 3, 4, 2), 0.125, np.float32)},
    "first": {"kernel": np.full((3, 3, 6, 4), 0.25, np.float32)},
}
BATCH = np.arange(2 * 5 * 5 * 6, dtype=np.float32).reshape(2, 5, 5, 6) / 64
WANTED = {"first/kernel": Role.FIRST_CONV, "deep/kernel": Role.DEEP_CONV}


def _conv(x, kernel):
    dimensions = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=dimensions
    )


@jax.custom_vjp
def _conv_with_rule(x, kernel):
    return _conv(x, kernel)


def _forward(x, kernel):
    return jax.vjp(_conv, x, kernel)


_conv_with_rule.defvjp(_forward, lambda pullback, ct: pullback(ct))


@jax.custom_jvp
def _doubled(x):
    return 2 * x


_doubled.defjvps(lambda tangent, out, x: 2 * tangent)

READS = {
    "plain": lambda x, k: _conv(x, k),
    "jit": lambda x, k: jax.jit(_conv)(x, k),
    "nested jit": lambda x, k: jax.jit(jax.jit(_conv))(x, k),
    "checkpoint": lambda x, k: jax.checkpoint(_conv)(x, k),
    "custom_vjp": lambda x, k: _conv_with_rule(x, k),
    "custom_jvp batch": lambda x, k: _conv(_doubled(x), k),
    "reshaped batch": lambda x, k: _conv(x.reshape(2, -1).reshape(x.shape), k),
    "cast batch": lambda x, k: _conv(x.astype(jnp.int32).astype(k.dtype), k),
    "scaled batch": lambda x, k: _conv((x - 0.5) / 0.25, k),
    "flipped batch": lambda x, k: _conv(x[:, ::-1], k),
    "cast kernel": lambda x, k: _conv(x, k.astype(jnp.bfloat16).astype(x.dtype)),
    "standardised kernel": lambda x, k: _conv(x, k - jnp.mean(k)),
    "reshaped kernel": lambda x, k: _conv(x, k.reshape(-1).reshape(k.shape)),
    "scan over samples": lambda x, k: lax.scan(
        lambda carry, one: (carry, _conv(one[None], k)[0]), 0, x
    )[1],
    "vmap over samples": lambda x, k: jax.vmap(lambda one: _conv(one[None], k)[0])(x),
}


def _loss(read, params, batch):
    x = batch.astype(params["first"]["kernel"].dtype)
    hidden = jax.nn.relu(read(x, params["first"]["kernel"]))
    out = jax.jit(_conv)(hidden, params["deep"]["kernel"])
    return jnp.mean(out.astype(jnp.float32))


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_an_example_finds_the_convolution_that_reads_the_input(how, precision):
    loss_fn = rjax.stateless_loss(functools.partial(_loss, READS[how]))
    config = rjax.Config(precision=precision)
    plan = rjax.make_plan(PARAMS, config, example=(loss_fn, BATCH))
    assert _roles(plan) == WANTED


def test_without_an_example_the_same_model_is_mistaken_but_legal():
    assert _roles(rjax.make_plan(PARAMS, FP32)) == {
        "deep/kernel": Role.FIRST_CONV,
        "first/kernel": Role.DEEP_CONV,
    }


def test_structs_will_do_for_parameters_and_batch():
    structs = jax.tree.map(lambda x: _struct(*x.shape), PARAMS)
    loss_fn = rjax.stateless_loss(functools.partial(_loss, _conv))
    plan = rjax.make_plan(structs, FP32, example=(loss_fn, _struct(*BATCH.shape)))
    assert _roles(plan) == WANTED


def test_two_stems_are_both_first():
    def loss(params, batch):
        return sum(jnp.sum(_conv(batch["x"], kernel)) for kernel in params.values())

    params = {"left": PARAMS["first"]["kernel"], "right": PARAMS["first"]["kernel"]}
    example = (rjax.stateless_loss(loss), {"x": BATCH, "label": np.zeros(2, np.int32)})
    plan = rjax.make_plan(params, FP32, example=example)
    assert set(_roles(plan).values()) == {Role.FIRST_CONV}


def test_a_convolution_of_constants_does_not_read_the_input():
    def loss(params, batch):
        grid = jnp.ones((1, 5, 5, 6))
        positions = _conv(grid, params["first"]["kernel"])
        return jnp.mean(_conv(positions, params["deep"]["kernel"])) + jnp.mean(batch)

    plan = rjax.make_plan(PARAMS, FP32, example=(rjax.stateless_loss(loss), BATCH))
    assert set(_roles(plan).values()) == {Role.DEEP_CONV}


def test_statistics_and_key_are_not_the_input():
    def loss_fn(params, batch_stats, batch, key):
        x = jnp.broadcast_to(batch_stats["mean"], BATCH.shape)
        hidden = _conv(x, params["first"]["kernel"])
        noise = jax.random.normal(key, hidden.shape)
        out = _conv(hidden, params["deep"]["kernel"]).sum() + noise.sum()
        return out + batch.sum(), (batch_stats, {})

    with jax.numpy_rank_promotion("allow"):
        plan = rjax.make_plan(
            PARAMS,
            FP32,
            batch_stats={"mean": np.zeros(6, np.float32)},
            example=(loss_fn, BATCH),
        )
    assert set(_roles(plan).values()) == {Role.DEEP_CONV}


def test_the_rule_has_the_last_word():
    plan = rjax.make_plan(
        PARAMS,
        FP32,
        rule=lambda path, leaf: (
            rjax.Param(role="deep_conv") if "first" in path else None
        ),
        example=(rjax.stateless_loss(functools.partial(_loss, _conv)), BATCH),
    )
    assert set(_roles(plan).values()) == {Role.DEEP_CONV}


def test_numbers_do_not_depend_on_the_choice():
    loss_fn = rjax.stateless_loss(functools.partial(_loss, _conv))
    trained = []
    for example in (None, (loss_fn, BATCH)):
        plan = rjax.make_plan(PARAMS, FP32, example=example)
        step = jax.jit(rjax.make_train_step(loss_fn, plan))
        state, report = step(rjax.init_state(plan, PARAMS), BATCH)
        assert report.applied
        trained.append(jax.tree.leaves(rjax.get_params(plan, state)))
    for one, other in zip(*trained, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("role", ["DEEP_CONV", "deep_conv", Role.DEEP_CONV])
def test_param_takes_a_role_by_name(role):
    assert rjax.Param(role=role).role is Role.DEEP_CONV


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"role": "conv"}, "`role` must be one of 'bn_bias', .*, got 'conv'"),
        ({"precision": "fp16"}, "`precision` must be 'half' or 'float32', got 'fp16'"),
    ],
)
def test_param_refuses_what_it_does_not_know(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        rjax.Param(**options)
    assert "\n" not in str(caught.value)
