"""Programs as files: they go on elsewhere with the same bits, or are refused."""

import dataclasses
import hashlib
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BOTH, both, config, fresh_process, make_rig

import rjax
from rjax.programs import saved

RIG = config(ema=rjax.Ema(0.9), optimizer=rjax.optim.nesterov())

ELSEWHERE = """
import jax, numpy as np, rjax
from helpers import BOTH, both, config, digest, make_rig

rig = make_rig(
    BOTH, config(ema=rjax.Ema(0.9), optimizer=rjax.optim.nesterov())
)
folder = {folder!r}
step = rjax.load_captured(folder + "/step.rjax", rig.plan)
arrays = np.load(folder + "/state.npz")
fresh, tree = jax.tree.flatten(rig.state())
leaves = [arrays[str(i)] for i in range(len(fresh))]
leaves[-1] = jax.random.wrap_key_data(leaves[-1])
state = jax.tree.unflatten(tree, leaves)
for g in (np.nan, 3.0, 0.5):
    state, report = step(state, both(g))
print(digest(state), float(report.loss), float(report.grad_norm))
"""


@pytest.fixture(scope="module")
def rig():
    return make_rig(BOTH, RIG)


@pytest.fixture(scope="module")
def captured(rig):
    return rjax.capture(rig.eager, rig.state(), both(1.0))


@pytest.fixture
def file(captured, tmp_path):
    return captured.save(tmp_path / "step.rjax")


def test_a_run_goes_on_in_a_fresh_process(rig, captured, file):
    from helpers import digest, host

    state, _ = rig.run(rig.state(), [both(1.0), both(2.0)])
    leaves = [host(x) for x in jax.tree.leaves(state)]
    arrays: Any = {str(i): x for i, x in enumerate(leaves)}
    np.savez(file.parent / "state.npz", **arrays)
    state, reports = rig.run(state, [both(np.nan), both(3.0), both(0.5)])
    wanted = f"{digest(state)} {float(reports[-1].loss)} {float(reports[-1].grad_norm)}"
    assert fresh_process(ELSEWHERE.format(folder=str(file.parent))) == wanted


def rewrite(path, change):
    """Change header and program of a file, under a hash that is right again."""
    header, program = saved._parts(path)
    header, program = change(header, program)
    text = json.dumps(header).encode()
    content = saved._MAGIC + len(text).to_bytes(8, "little") + text + program
    path.write_bytes(content + hashlib.sha256(content).digest())


def said(path, plan=None):
    with pytest.raises(ValueError) as caught:
        rjax.load_captured(path, plan)
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".") and str(path) in text
    return text.replace(str(path), "FILE")


def test_every_flipped_bit_and_every_cut_is_refused(file):
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    for at in [0, 5, 22, 25, 31, len(whole) - 1, *rng.integers(len(whole), size=40)]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        assert re.match("FILE is (damaged|no captured program)", said(file))
    for length in [0, 3, 22, 29, 40, 200, len(whole) - 33, len(whole) - 1]:
        file.write_bytes(whole[:length])
        assert re.match("FILE is (damaged|no captured program)", said(file))
    file.write_bytes(whole)
    rjax.load_captured(file)


@pytest.mark.parametrize(
    "change",
    [
        lambda h, p: ([h], p),
        lambda h, p: ({"format": 1}, p),
        lambda h, p: ({**h, "state": [3]}, p),
        lambda h, p: ({**h, "batch": h["batch"][:1]}, p),
        lambda h, p: (h, b""),
        lambda h, p: (h, b"\x80\x04\x95" * 100),
        lambda h, p: (h, p[: len(p) // 2]),
    ],
)
def test_what_is_whole_but_no_program_is_refused(file, change):
    rewrite(file, change)
    assert said(file) == (
        "FILE is damaged or cut short; capture the step and save it again."
    )


def test_foreign_and_missing_files(tmp_path):
    path = tmp_path / "x.rjax"
    with pytest.raises(FileNotFoundError):
        rjax.load_captured(path)
    path.write_text("{}")
    assert said(path).startswith("FILE is no captured program; save one")


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("versions", {"jax": "0.1", "jaxlib": "0.1", "rjax": "0"}, "versions jax 0.1"),
        ("platform", "tpu", "platform tpu, this is "),
        ("device", "NVIDIA T4", "device NVIDIA T4, this is "),
        ("format", 2, "has format 2, this version of rjax reads 1"),
    ],
)
def test_other_versions_and_devices_are_refused(file, field, value, wanted):
    rewrite(file, lambda header, program: ({**header, field: value}, program))
    assert wanted in said(file) and "capture the step and save it again" in said(file)


def test_another_plan_is_refused(file, rig):
    other = make_rig((("kernel", (3, 1)), ("other", (3,))), RIG)
    text = said(file, other.plan)
    fingerprints = [rig.plan.fingerprint[:12], other.plan.fingerprint[:12]]
    assert text == (
        "FILE was saved for the plan {}, `plan` is {}; capture the step with this "
        "plan.".format(*fingerprints)
    )


def slower(count):
    return 0.1 / (1 + count.astype(jnp.float32))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"optimizer": rjax.optim.nesterov(momentum=0.5)}, "optimizer"),
        ({"clip": rjax.Clip(norm=1.0)}, "clip None"),
        ({"ema": rjax.Ema(0.5)}, "ema"),
        ({"scaling": rjax.scaling.halving(factor=0.25)}, "scaling"),
        (
            {"learning_rate": slower},
            "learning_rate None, `plan` has",
        ),
    ],
)
def test_another_config_is_refused(file, rig, changes, wanted):
    plan = dataclasses.replace(
        rig.plan, config=dataclasses.replace(rig.plan.config, **changes)
    )
    assert f"was saved with {wanted}" in said(file, plan)


def test_two_schedules_of_one_function_are_told_apart():
    def decay(rate):
        return lambda n: rate * 0.99 ** n.astype(jnp.float32)

    first, same, other = (
        saved.describe_config(config(learning_rate=decay(r))) for r in (0.1, 0.1, 0.2)
    )
    assert first == same != other
    assert first["learning_rate"][0] == pytest.approx(0.1)


class Mine:
    """A rule for the loss scale that is no dataclass."""

    def init(self):
        return jnp.float32(8.0), ()

    def next(self, scale, state, flag):
        return scale, state


def test_a_rule_of_the_users_own_is_kept_and_known_again(tmp_path):
    rig = make_rig(BOTH, config(scaling=Mine()))
    captured = rjax.capture(rig.eager, rig.state(), both(1.0))
    path = captured.save(tmp_path / "step.rjax")
    # Another object of the class, as in another process.
    again = dataclasses.replace(
        rig.plan, config=dataclasses.replace(rig.plan.config, scaling=Mine())
    )
    rjax.load_captured(path, again)


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 0.5},
        {"scaling": rjax.scaling.halving(init=16.0)},
    ],
)
def test_what_lies_in_the_state_may_differ(file, rig, changes):
    plan = dataclasses.replace(
        rig.plan, config=dataclasses.replace(rig.plan.config, **changes)
    )
    rjax.load_captured(file, plan)


def test_without_a_plan_nothing_can_be_compared(rig, tmp_path):
    step = rjax.capture(lambda s, b: rig.eager(s, b), rig.state(), both(1.0))
    path = step.save(tmp_path / "step.rjax")
    assert "was saved without a plan" in said(path, rig.plan)
    rjax.load_captured(path)
    step = rjax.capture(
        lambda s, b: rig.eager(s, b), rig.state(), both(1.0), plan=rig.plan
    )
    rjax.load_captured(step.save(path), rig.plan)


def test_results_of_an_unknown_type_are_refused_when_saved(rig, tmp_path):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Mine:
        loss: jax.Array

    def step(state, batch):
        state, report = rig.eager(state, batch)
        return state, Mine(report.loss)

    captured = rjax.capture(step, rig.state(), both(1.0))
    with pytest.raises(ValueError, match="`step` returns what cannot be kept .*Mine"):
        captured.save(tmp_path / "step.rjax")
    assert not list(tmp_path.iterdir())
    by_number = rjax.capture(
        lambda s, b: (rig.eager(s, b)[0], {1: s.scale}), rig.state(), both(1.0)
    )
    with pytest.raises(ValueError, match="cannot be kept .*string keys"):
        by_number.save(tmp_path / "step.rjax")


def test_a_program_that_reaches_the_host_is_not_saved(rig, tmp_path):
    def step(state, batch):
        state, report = rig.eager(state, batch)
        jax.debug.callback(lambda loss: None, report.loss)
        return state, report

    captured = rjax.capture(step, rig.state(), both(1.0))
    with pytest.raises(ValueError, match="`step` is not static: .*callback"):
        captured.save(tmp_path / "other.rjax")
    assert not (tmp_path / "other.rjax").exists()


def test_a_program_that_someone_else_made_reaches_no_host_either(file):
    """JAX exports no callback, so this one is put into the program by hand."""
    from jax._src.export import _export
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    def call(header, program):
        exported = jax.export.deserialize(bytearray(program))
        lines = exported.mlir_module().splitlines()
        [at, *_] = [i for i, line in enumerate(lines) if "= stablehlo.add " in line]
        found = re.match(r"(.*= )stablehlo.add (%\S+), \S+ : (\S+)", lines[at])
        assert found
        lines[at] = (
            f"{found[1]}stablehlo.custom_call @xla_ffi_python_cpu_callback({found[2]}) "
            f": ({found[3]}) -> {found[3]}"
        )
        with mlir.make_ir_context():
            module = ir.Module.parse("\n".join(lines))
            code = _export._module_to_bytecode(module)
        changed = dataclasses.replace(exported, mlir_module_serialized=code)
        return header, bytes(changed.serialize())

    rewrite(file, call)
    assert said(file).startswith("FILE is not static: it has a host callback, `xla_ffi")


def test_state_types_are_exported_by_name(rig):
    """Whoever exports a step of their own keeps our classes too, without pickle."""
    arguments = jax.eval_shape(lambda: (rig.state(), both(1.0)))
    exported = jax.export.export(jax.jit(rig.eager))(*arguments)
    again = jax.export.deserialize(exported.serialize())
    state, report = again.call(rig.state(), both(1.0))
    wanted, _ = rig.eager(rig.state(), both(1.0))
    assert isinstance(state, rjax.RegionState) and isinstance(report, rjax.Report)
    np.testing.assert_allclose(rig.both(state), rig.both(wanted), rtol=1e-6)
    assert again.in_tree == exported.in_tree and again.out_tree == exported.out_tree
