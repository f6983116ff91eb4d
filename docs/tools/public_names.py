"""What every public name has to say about itself, and where names are listed.

The build of the documentation and the tests both ask :func:`problems`.
"""

import doctest
import enum
import inspect
import types
from collections.abc import Iterator
from typing import Any

import rjax

# Functions that no argument of the right type can make fail.
NEVER_RAISE = {
    "rjax.diagnose",
    "rjax.ops.unscale",
    "rjax.repro.digest",
    "rjax.repro.tensors",
    "rjax.scaling.off",
    "rjax.stateless_loss",
}
# A union of types has no docstring of its own.
UNDESCRIBED = {"rjax.optim.Optimizer"}
# Every stage takes and returns an `InFlight`, and none raises: the docstring of the
# module says so, and its example runs them all.
DESCRIBED_TOGETHER = "rjax.stages"
# What modules without an `__all__` have for their users.
LISTED = {
    "rjax.scaling": ("dynamic", "halving", "off", "static"),
    "rjax.stages": (
        *("InFlight", "begin", "forward_backward", "cast_deep_grads", "reduce_deep"),
        *("cast_first_grads", "reduce_first", "digest_grads", "check_and_scale"),
        *("reconcile_stats", "commit_stats", "update", "update_ema"),
        *("cast_to_compute", "cast_ema_to_compute", "apply", "finish"),
    ),
}


def modules() -> dict[str, types.ModuleType]:
    """Return the front door and its public submodules, by full name."""
    found = {"rjax": rjax}
    for name in rjax.__all__:
        member = getattr(rjax, name)
        if isinstance(member, types.ModuleType):
            found[f"rjax.{name}"] = member
    return found


def public_names(module: str) -> dict[str, Any]:
    """Return what a module has for its users, but for modules, by full name.

    Without an `__all__`, that is what it defines or takes from below itself.
    """
    owner = modules()[module]
    listed = getattr(owner, "__all__", None) or LISTED.get(module)
    if listed is None:
        listed = [name for name in sorted(vars(owner)) if _own(owner, name)]
    members = {f"{module}.{name}": getattr(owner, name) for name in listed}
    return {k: v for k, v in members.items() if not isinstance(v, types.ModuleType)}


def _own(module: types.ModuleType, name: str) -> bool:
    member = getattr(module, name)
    kind = inspect.isfunction(member) or inspect.isclass(member)
    below = getattr(member, "__module__", "").startswith(module.__name__)
    return kind and below and not name.startswith("_")


def everything() -> dict[str, Any]:
    """Return every public name of every module with what it stands for."""
    names = [public_names(module) for module in modules()]
    found = {name: member for group in names for name, member in group.items()}
    return {name: found[name] for name in found if name not in UNDESCRIBED}


def problems(name: str, member: Any) -> Iterator[str]:
    """Say what the docstring of a public name lacks, a few words each."""
    doc = inspect.getdoc(member) or ""
    if not doc or doc.startswith(f"{member.__name__}("):
        yield "a docstring"
        return
    if name.startswith(f"{DESCRIBED_TOGETHER}."):
        return
    if not doctest.DocTestParser().get_examples(doc):
        yield "an example that runs"
    if inspect.isclass(member):
        plain = issubclass(member, (enum.Enum, Exception))
        if not plain and "Args:" not in doc and "Attributes:" not in doc:
            yield "its attributes"
        return
    signature = inspect.signature(member)
    if signature.parameters and "Args:" not in doc:
        yield "its arguments"
    silent = signature.return_annotation is None
    if not silent and "Returns:" not in doc and "Yields:" not in doc:
        yield "what it returns"
    if "Raises:" not in doc and name not in NEVER_RAISE:
        yield "its errors"
