import inspect

import pytest

import rjax

NAMES = [
    "Captured",
    "CapturedEpoch",
    "Clip",
    "Config",
    "Ema",
    "EpochReport",
    "Leaf",
    "LossScale",
    "NonFiniteGradientsError",
    "Param",
    "Plan",
    "Policy",
    "Region",
    "RegionState",
    "Report",
    "Results",
    "Role",
    "Slot",
    "adopt_ema",
    "apply_gated",
    "capture",
    "capture_epoch",
    "check",
    "checkpoint",
    "compute_view",
    "data",
    "diagnose",
    "enable_compilation_cache",
    "get_batch_stats",
    "get_params",
    "init_state",
    "linen_loss",
    "load_captured",
    "make_eval_step",
    "make_plan",
    "make_train_step",
    "nn",
    "nnx_loss",
    "nnx_update",
    "nnx_variables",
    "ops",
    "optim",
    "parallel",
    "replace_params",
    "repro",
    "scaled_value_and_grad",
    "scaling",
    "set_xla_flags",
    "stages",
    "stateless_loss",
]
SUBMODULES = {
    "checkpoint": [
        *("CheckpointError", "Checkpoints", "DamagedError", "Restored"),
        *("export_weights", "load_weights", "restore", "save"),
    ],
    "nn": [
        *("BasicBlock", "BatchNorm", "BottleneckBlock", "CNN", "Conv", "ConvBNReLU"),
        *("Dense", "LayerNorm", "LoRADense", "MLP", "ResNet", "ResNet50"),
        *("Transformer", "TransformerBlock", "VGG16BN", "Window", "from_torchvision"),
        "masked_cross_entropy",
    ],
    "optim": ["adam", "adamw", "from_optax", "lars", "momentum", "nesterov", "sgd"],
    "parallel": [
        *("DataParallelStep", "bytes_per_device", "data_parallel", "gather"),
        *("replicate", "shard_batch"),
    ],
    "repro": ["compare", "deterministic", "digest", "record", "sweep", "tensors"],
    "scaling": ["dynamic", "halving", "off", "static"],
    "stages": [
        *("begin", "forward_backward", "cast_deep_grads", "reduce_deep"),
        *("cast_first_grads", "reduce_first", "check_and_scale", "reconcile_stats"),
        *("commit_stats", "update", "update_ema", "cast_to_compute"),
        *("cast_ema_to_compute", "apply", "finish", "InFlight"),
    ],
}


def test_the_public_names():
    assert rjax.__all__ == sorted(rjax.__all__)
    assert rjax.__all__ == NAMES
    assert rjax.__version__


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_a_docstring(name):
    doc = inspect.getdoc(getattr(rjax, name))
    assert doc and not doc.startswith(f"{name}("), "written, not generated"


@pytest.mark.parametrize("name", ["ops", "optim"])
def test_public_lists_of_submodules_are_sorted_and_documented(name):
    module = getattr(rjax, name)
    assert list(module.__all__) == sorted(module.__all__)
    for member in module.__all__:
        found = getattr(module, member)
        if callable(found):
            assert inspect.getdoc(found), member


@pytest.mark.parametrize(
    ("module", "name"), [(m, n) for m, names in SUBMODULES.items() for n in names]
)
def test_the_contract_of_submodules(module, name):
    assert inspect.getdoc(getattr(getattr(rjax, module), name))


@pytest.mark.parametrize("kind", ["Plan", "RegionState", "Report", "Slot"])
def test_public_methods_have_docstrings(kind):
    for name, member in inspect.getmembers(getattr(rjax, kind)):
        if callable(member) and not name.startswith("_"):
            assert inspect.getdoc(member), name
