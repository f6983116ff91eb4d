"""Mixed-precision training for JAX as pure functions over flat region arrays.

FP16 compute with FP32 master weights, planned ahead: every parameter has a slot in a
few flat arenas, and casting, checking, updating and averaging the model are each one
operation over one array, inside your own jitted step.
"""

from rjax import checkpoint, data, nn, ops, optim, parallel, repro, scaling, stages
from rjax.adoption import compute_view, scaled_value_and_grad
from rjax.config import Clip, Config, Ema, Policy
from rjax.diagnosis import NonFiniteGradientsError, check, diagnose
from rjax.gated import apply_gated
from rjax.layout import Leaf, Slot
from rjax.loss_scale import LossScale
from rjax.losses import linen_loss, stateless_loss
from rjax.nnx import nnx_loss, nnx_update, nnx_variables
from rjax.plan import Plan, make_plan
from rjax.programs import (
    Captured,
    CapturedEpoch,
    EpochReport,
    capture,
    capture_epoch,
    enable_compilation_cache,
    load_captured,
)
from rjax.regions import Region, Role
from rjax.report import Report
from rjax.roles import Param
from rjax.state import RegionState, Results, init_state
from rjax.step import make_eval_step, make_train_step
from rjax.weights import adopt_ema, get_batch_stats, get_params, replace_params
from rjax.xla_flags import set_xla_flags

__version__ = "0.1.0"

__all__ = [
    "Captured", "CapturedEpoch", "Clip", "Config", "Ema", "EpochReport", "Leaf",
    "LossScale", "NonFiniteGradientsError", "Param", "Plan", "Policy", "Region",
    "RegionState", "Report", "Results", "Role", "Slot", "adopt_ema", "apply_gated",
    "capture", "capture_epoch", "check", "checkpoint", "compute_view", "data",
    "diagnose", "enable_compilation_cache", "get_batch_stats", "get_params",
    "init_state", "linen_loss", "load_captured", "make_eval_step", "make_plan",
    "make_train_step", "nn", "nnx_loss", "nnx_update", "nnx_variables", "ops",
    "optim", "parallel", "replace_params", "repro", "scaled_value_and_grad",
    "scaling", "set_xla_flags", "stages", "stateless_loss",
]  # fmt: skip
