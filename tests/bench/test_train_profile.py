"""The profile of the benchmark of whole steps: events and programs, made up."""

import doctest
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import benchmark

profiling = benchmark("throughput.profiling")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("jit(f)/forward_backward/jvp(VGG)/conv/conv_general_dilated", "conv"),
        ("jit(f)/transpose(jvp(ResNet))/head/dot_general", "conv"),
        ("jit(f)/jvp(ResNet)/stage2_block1/shortcut_conv/transpose", "conv"),
        ("jit(f)/transpose(jvp(ResNet))/stage1_block1/cbr1/bn/reduce_sum", "norm"),
        ("jit(f)/jvp(ResNet)/stage2_block1/shortcut_bn/mul", "norm"),
        ("jit(f)/jvp(ResNet)/BatchNorm_0/mul", "norm"),
        ("jit(f)/jvp(ResNet)/stage1_block1/add", "norm"),
        ("jit(f)/jvp(VGG16BN)/stage1_cbr1/jit(relu)/max", "norm"),
        ("jit(f)/jvp(ResNet)/reduce_window_max", "pool"),
        ("jit(f)/transpose(jvp(ResNet))/select_and_scatter_add", "pool"),
        ("jit(f)/cond/branch_0_fun/update/mul", "update"),
        ("jit(f)/cast_first_grads/concatenate", "update"),
        ("jit(f)/check_and_scale/reduce_sum", "update"),
        ("jit(f)/div", "update"),  # what Flax does outside of any module
        ("jit(f)/forward_backward/convert_element_type", "other"),
        ("jit(f)/jvp()/reduce_sum", "other"),
        ("jit(f)/jvp(VGG16BN)/jit(relu)/max", "other"),
        ("add", "other"),
        ("", "other"),
    ],
)  # fmt: skip
def test_paths_have_categories(path: str, kind: str) -> None:
    assert profiling.kind_of_path(path) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("rjax_bn_apply", "norm"),
        ("mosaic_gpu_rjax_bn_apply_pool_kernel", "norm+pool"),
        ("rjax_update", "update"),
        ("rjax_check_finite", "update"),
        ("sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc", "conv"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm>", "conv"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "conv"),
        ("void cudnn::ops::nchwToNhwcKernel", "conv"),
        ("select_and_scatter_12", "pool"),
        ("loop_convert_fusion_3", "other"),
        ("MemcpyD2D", "other"),
    ],
)
def test_kernels_have_categories(name: str, kind: str) -> None:
    assert profiling.kind_of_kernel(name) == kind


PROGRAM = """HloModule jit_f, is_scheduled=true

%fused_computation.1 (param_0: f16[4,8]) -> f16[4,8] {
  %param_0 = f16[4,8]{1,0} parameter(0)
  %m.1 = f16[4,8]{1,0} multiply(%param_0, %param_0), metadata={op_name="jit(f)/jvp(N)/bn/mul"}
  ROOT %r.1 = f16[4,8]{1,0} reduce-window(%m.1), metadata={op_name="jit(f)/jvp(N)/reduce_window_max"}
}

%gemm_computation (p: f16[4,8]) -> f16[4,8] {
  %p = f16[4,8]{1,0} parameter(0)
  ROOT %dot.3 = f16[4,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, metadata={op_name="jit(f)/x"}
}

%unnamed (q: f32[8]) -> (f32[8], f32[8]) {
  %q = f32[8]{0} parameter(0)
  %s.1 = f32[8]{0} subtract(%q, %q), metadata={op_name="jit(f)/cond/update/sub" stack_frame_id=3}
  ROOT %t = (f32[8]{0}, f32[8]{0}) tuple(%q, %s.1)
}

%command_buffer (a: f16[4,8]) -> f16[4,8] {
  %a = f16[4,8]{1,0} parameter(0)
  ROOT %fusion.4 = f16[4,8]{1,0} fusion(%a), kind=kLoop, calls=%fused_computation.1
}

ENTRY %main.9 (Arg_0.1: f16[4,8]) -> f16[4,8] {
  %Arg_0.1 = f16[4,8]{1,0} parameter(0)
  %cudnn-conv.2 = (f16[4,8]{1,0}, u8[0]{0}) custom-call(%Arg_0.1), custom_call_target="__cudnn$convForward"
  %mosaic.1 = f16[4,8]{1,0} custom-call(%Arg_0.1), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/jvp(N)/bn/rjax_bn_apply_pool"}
  %gemm_fusion_dot.3 = f16[4,8]{1,0} fusion(%Arg_0.1), kind=kCustom, calls=%gemm_computation
  %loop_subtract_fusion.7 = (f32[8]{0}, f32[8]{0}) fusion(%Arg_0.1), kind=kLoop, calls=%unnamed
  %copy.8 = f16[4,8]{0,1} copy(%Arg_0.1)
  ROOT %call = f16[4,8]{1,0} call(%Arg_0.1), to_apply=%command_buffer
}
"""  # noqa: E501


def test_instructions_have_categories() -> None:
    kinds = profiling.kinds_of(PROGRAM)
    assert {k: kinds[k] for k in kinds if "_" in k or k in ("call", "fusion_4")} == {
        "m_1": "norm", "r_1": "pool", "dot_3": "conv", "s_1": "update",
        "param_0": "other", "Arg_0_1": "other", "fusion_4": "norm+pool",
        "cudnn_conv_2": "conv", "mosaic_1": "norm+pool", "gemm_fusion_dot_3": "conv",
        "loop_subtract_fusion_7": "update", "copy_8": "other", "call": "",
    }  # fmt: skip


def event(name: str, milliseconds: float, stats: Any = ()) -> Any:
    return SimpleNamespace(name=name, duration_ns=1e6 * milliseconds, stats=stats)


def trace(**lines: Any) -> Any:
    """Return a trace of one plane for each key, of one line for each of its items."""
    planes = [
        SimpleNamespace(
            name=plane,
            lines=[SimpleNamespace(name=n, events=e) for n, e in found.items()],
        )
        for plane, found in lines.items()
    ]
    return SimpleNamespace(planes=planes)


def test_a_gpu_is_read_by_its_streams() -> None:
    stream = [
        event("sm90_xmma_fprop", 4.0, [("hlo_op", "cudnn-conv.2"), ("other", 1)]),
        event("fusion_4", 2.0, [("hlo_op", "call")]),  # in a command buffer
        event("loop_subtract_fusion_7", 1.0, None),
        event("loop_subtract_fusion_7", 1.0),
        event("rjax_bn_reduce", 6.0, [("hlo_op", "copy.8")]),
        event("MemcpyD2D", 0.5),
    ]
    data = trace(
        **{
            "/host:CPU": {"python": [event("call", 99.0, [("hlo_op", "call")])]},
            "/device:GPU:0": {"Stream #13(Compute)": stream, "XLA Ops": stream},
        }
    )
    events = list(profiling.read_events(data))
    assert len(events) == len(stream)
    found = profiling.summarize(events, profiling.kinds_of(PROGRAM), steps=2)
    assert found["ms"] == {
        "conv": 2.0, "norm": 3.0, "norm+pool": 1.0, "pool": 0.0, "update": 1.0,
        "other": 0.25,
    }  # fmt: skip
    assert [(row["name"], row["ms"], row["runs"]) for row in found["top"]][:3] == [
        ("copy.8 | rjax_bn_reduce", 3.0, 0.5),
        ("cudnn-conv.2 | sm90_xmma_fprop", 2.0, 0.5),
        ("call | fusion_4", 1.0, 0.5),
    ]
    text = list(profiling.lines("rjax", found))
    assert text[0].startswith("rjax, ms a step: conv 2.00  norm 3.00  norm+pool 1.00")
    assert text[0].endswith("sum 7.25") and len(text) == 1 + len(found["top"])


def test_a_cpu_is_read_by_what_names_an_instruction() -> None:
    op = lambda name: [("hlo_op", name)]  # noqa: E731
    worker = [
        event("dot.3", 1.0, op("dot.3")),
        event("end: dot.3", 9.0, op("dot.3")),
        event("call", 9.0, op("call")),  # around others
        event("ThreadpoolListener::Record", 9.0),
        event("unknown", 0.5, op("unknown")),
    ]
    events = list(profiling.read_events(trace(**{"/host:CPU": {"worker": worker}})))
    found = profiling.summarize(events, profiling.kinds_of(PROGRAM), steps=1)
    assert {k: v for k, v in found["ms"].items() if v} == {"conv": 1.0, "other": 0.5}


def test_a_profile_that_failed_is_said() -> None:
    assert list(profiling.lines("rjax", {"failed": "nothing was written"})) == [
        "rjax: not profiled: nothing was written"
    ]


def test_the_doctests_of_the_profile_hold() -> None:
    found = doctest.testmod(profiling)
    assert found.attempted > 0 and found.failed == 0
