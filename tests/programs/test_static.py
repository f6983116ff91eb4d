"""What a program asks of the host is found, in what XLA runs and in what JAX lowers."""

import jax
import jax.numpy as jnp
import pytest
from helpers import BOTH, both, config, make_rig
from jax.experimental import io_callback

import rjax
from rjax.programs import static


def printed(x):
    jax.debug.print("{}", x)
    return x


def called(x):
    return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def ordered(x):
    io_callback(lambda a: None, None, x, ordered=True)
    return x


@pytest.fixture(scope="module")
def rig():
    return make_rig(BOTH, config())


def test_a_step_asks_for_nothing(rig):
    rjax.capture(rig.eager, rig.state(), both(1.0)).assert_static()


@pytest.mark.parametrize(
    ("reach", "where"),
    [(printed, "loss"), (printed, "after"), (called, "after"), (ordered, "after")],
)
def test_a_callback_is_found_wherever_it_is(reach, where):
    def loss(params, batch):
        total = sum(
            jnp.sum(p.astype(jnp.float32) * batch[k]) for k, p in params.items()
        )
        return reach(total) if where == "loss" else total

    plan = make_rig(BOTH, config()).plan
    inner = rjax.make_train_step(rjax.stateless_loss(loss), plan)

    def step(state, batch):
        state, report = inner(state, batch)
        if where == "after":
            report = reach(report.loss)
        return state, report

    state = make_rig(BOTH, config()).state()
    captured = rjax.capture(step, state, both(1.0))
    with pytest.raises(AssertionError, match="`step` is not static: it has .*callback"):
        captured.assert_static()


TEXTS = [
    ('%c = f32[] custom-call(%x), custom_call_target="xla_ffi_python_gpu_callback"',
     "a host callback, `xla_ffi_python_gpu_callback`"),
    ("%0 = stablehlo.custom_call @xla_python_cpu_callback(%arg0) : tensor<f32>",
     "a host callback, `xla_python_cpu_callback`"),
    ('%0 = "stablehlo.custom_call"(%a) {call_target_name = "xla_ffi_cpu_callback"}',
     "a host callback, `xla_ffi_cpu_callback`"),
    ("%i = (f32[4]{0}, token[]) infeed(%token)", "a transfer, `infeed`"),
    ("%o = token[] outfeed(%x, %token)", "a transfer, `outfeed`"),
    ("%s = (f32[2]{0}, u32[], token[]) send(%x, %t), channel_id=1, "
     "is_host_transfer=true", "a transfer, `send`"),
    ('%2 = "stablehlo.recv"(%t) : (!stablehlo.token) -> tensor<f32>',
     "a transfer, `stablehlo.recv`"),
    ("%c = f32[8]{0:S(5)} copy(%x)", "an array in host memory"),
]  # fmt: skip
QUIET = [
    '%c = f32[4]{0} custom-call(%x), custom_call_target="__cublas$gemm"',
    "%s = (f32[2]{0}, u32[], token[]) send(%x, %t), channel_id=1",
    "%0 = stablehlo.custom_call @mosaic_gpu_v2(%arg0) : tensor<f32>",
    '%a = f32[2]{0} add(%x, %y), metadata={op_name="jit(f)/callback/infeed/add"}',
    "%f = f32[8]{0:T(128)S(1)} fusion(%x)",
]


@pytest.mark.parametrize(("line", "wanted"), TEXTS)
def test_lines_that_reach_the_host(line, wanted):
    assert list(static.host_traffic(f"HloModule m\n  {line}\n")) == [wanted]


@pytest.mark.parametrize("line", QUIET)
def test_lines_that_do_not(line):
    assert not list(static.host_traffic(line))


def test_it_says_where_from():
    line = (
        '%c = f32[] custom-call(%x), custom_call_target="my_callback", metadata={'
        'op_name="jit(step)/loss/debug" source_file="train.py" source_line=12}'
    )
    with pytest.raises(
        ValueError,
        match=r"x is not static: it has a host callback, `my_callback` "
        r"\(jit\(step\)/loss/debug\) at train.py:12; take it out",
    ):
        static.check(line, "x")
