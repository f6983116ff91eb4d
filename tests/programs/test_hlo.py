"""Reading compiled programs: what runs, how often, what it moves, whose it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BOTH, SIX, both, config, make_rig, ones

import rjax
from rjax import stages
from rjax.inflight import STAGES
from rjax.programs import hlo, tables

TEXT = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->()}

%fused_a (param_0: f32[8]) -> f32[8] {
  %param_0 = f32[8]{0} parameter(0)
  %mul.1 = f32[8]{0} multiply(%param_0, %param_0), metadata={op_name="jit(s)/update/mul"}
  ROOT %add.1 = f32[8]{0} add(%mul.1, %param_0), metadata={op_name="jit(s)/update_ema/a"}
}

%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %arg = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[8]{0} get-tuple-element(%arg), index=1
  %y = f32[8]{0} negate(%x), metadata={op_name="jit(s)/while/body/forward_backward/neg"}
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %y)
}

%cond (arg.1: (s32[], f32[8])) -> pred[] {
  %arg.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%skip (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %big = f32[1024]{0} broadcast(%p), metadata={op_name="jit(s)/cond/skip/broadcast"}
  ROOT %r = f32[8]{0} slice(%big), metadata={op_name="jit(s)/cond/skip/slice"}
}

%apply (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %go = f32[8]{0} fusion(%q), kind=kLoop, calls=%fused_a, metadata={op_name="o"}
}

ENTRY %main (p0: f32[8], p1: pred[]) -> f32[8] {
  %p0 = f32[8]{0} parameter(0)
  %p1 = pred[] parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0}) tuple(%zero, %p0)
  %loop = (s32[], /*index=1*/f32[8]{0}) while(%start), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %out = f32[8]{0} get-tuple-element(%loop), index=1
  %c = (f32[8]{0}, s8[64]{0}) custom-call(%out, %out), custom_call_target="__cublas$gemm", metadata={op_name="jit(s)/forward_backward/dot"}
  %d = f32[8]{0} get-tuple-element(%c), index=0
  ROOT %e = f32[8]{0} conditional(%p1, %d, %d), true_computation=%skip, false_computation=%apply, metadata={op_name="jit(s)/cond"}
}
"""  # noqa: E501


def test_what_runs_and_how_often():
    program = hlo.parse(TEXT)
    assert program.entry == "main" and len(program.computations) == 6
    runs = [(i.name, times, program.moved(i)) for i, times in program.launched()]
    # The loop's body five times, the call, and of the branches the ordinary one; the
    # fusion's operands and results are in memory, what is inside of it is not.
    assert runs == [("y", 5, 64), ("c", 1, 32 + 32 + 64), ("go", 1, 64)]
    call = program.computations["main"]["c"]
    assert call.target == "__cublas$gemm" and call.operands == ("out", "out")
    assert call.path == "jit(s)/forward_backward/dot"


def test_stages_of_a_text():
    table = tables.stage_table(hlo.parse(TEXT))
    rows = {row.name: (row.kernels, row.nbytes) for row in table.rows}
    assert rows["forward_backward"] == (6, 5 * 64 + 128)
    assert rows["update + update_ema"] == (1, 64)
    assert rows["update"] == rows["update_ema"] == rows["(no stage)"] == (0, 0)
    assert (table.kernels, table.nbytes) == (7, 512)
    names = [row.name for row in table.rows]
    assert names[: len(STAGES)] == list(STAGES) and names[-1] == "(no stage)"


def test_stages_that_run_as_one_and_names_of_the_user():
    path = "jit(f)/jit(main)/update/update_ema/cast_to_compute/pallas_call"
    assert tables._of_path(path) == ["update", "update_ema", "cast_to_compute"]
    mine = "jit(f)/forward_backward/jvp(Net)/update/mul"
    assert tables._of_path(mine) == ["forward_backward"]
    assert tables._of_path("jit(f)/mul") == []


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("f32[2,3]{1,0}", 24),
        ("(f16[4]{0}, bf16[3]{0}, pred[5]{0})", 8 + 6 + 5),
        ("s4[3]{0:E(4)}", 2),
        ("(f8e4m3fn[8]{0}, u64[], token[])", 16),
        ("c64[2]", 16),
        ("f32[0]", 0),
    ],
)
def test_bytes_of_types(kind, wanted):
    assert hlo.array_bytes(kind) == wanted


def test_every_stage_function_has_its_name_in_the_list():
    named = {name for name in STAGES if hasattr(stages, name)}
    assert named == set(STAGES)


def test_stages_of_a_step():
    rig = make_rig(SIX, config(ema=rjax.Ema(0.9), optimizer=rjax.optim.nesterov()))
    captured = rjax.capture(rig.eager, rig.state(), ones(SIX))
    table = captured.stages()
    found = {row.name: row for row in table.rows}
    assert table.kernels == sum(row.kernels for row in table.rows) > 0
    shares = {name: 0 for name in STAGES}
    for row in table.rows:
        for name in row.stages:
            shares[name] += row.kernels
    nothing = {"reduce_deep", "reduce_first", "digest_grads"}
    runs = {name for name, kernels in shares.items() if kernels}
    assert not nothing & runs
    assert runs >= {"forward_backward", "check_and_scale", "update", "update_ema"}
    assert found["update"].nbytes >= 3 * 4 * rig.plan.n
    lines = str(table).splitlines()
    assert lines[0].split() == ["stage", "kernels", "moved"] and len(lines) > 14
    assert "<th" in table._repr_html_() and "update_ema" in table._repr_html_()


def test_steps_in_a_loop_are_counted_as_often_as_they_run():
    rig = make_rig(BOTH, config())

    def epoch(state, batches):
        return jax.lax.scan(rig.eager, state, batches)

    def kernels(steps):
        data = jax.tree.map(lambda x: np.stack([x] * steps), both(1.0))
        table = rjax.capture(epoch, rig.state(), data).stages()
        return {row.name: row.kernels for row in table.rows}["forward_backward"]

    one, four = kernels(5), kernels(20)
    assert four == 4 * one > 0


def test_a_fusion_has_the_bytes_of_its_operands_and_its_result():
    text = jax.jit(lambda x, y: jnp.sin(x) * y + x).lower(
        jnp.ones(256), jnp.ones(256)
    ).compile().as_text()  # fmt: skip
    program = hlo.parse(text or "")
    [(kernel, times)] = program.launched()
    assert times == 1 and program.moved(kernel) == 3 * 1024
