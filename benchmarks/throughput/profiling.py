"""Where the time of a step goes: kernels of JAX's profiler, by category.

A kernel belongs to an instruction of the compiled program, whose metadata say from
which module or stage it came. Categories:

- conv: convolutions and matrix products, with their biases;
- norm: batch norm, and the ReLUs and residual sums that are fused to it or stand
  between convolutions;
- pool: max pooling; norm+pool: kernels that do both;
- update: all that follows the gradients: casts, check, optimizer, averages;
- other: the loss, dropout, the global mean, copies, and what has no name.

What rjax pools within a norm has the norm's name unless its kernel serves, so compare
sums of norm, norm+pool and pool.
"""

import collections
import dataclasses
import pathlib
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rjax.programs import hlo

CATEGORIES = ("conv", "norm", "norm+pool", "pool", "update", "other")
STEPS, TOP, TOP_EACH = 3, 15, 5

# By the name of a kernel; the first that is found counts.
_KERNELS = [
    ("norm+pool", r"rjax_bn_\w*pool"),
    ("norm", r"rjax_(bn|masked|moments)"),
    ("pool", r"rjax_max_pool"),
    ("conv", r"rjax_(conv|dense|matmul|pointwise)"),
    ("update", r"rjax_"),
    (
        "conv",
        r"cudnn|cublas|cutlass|xmma|implicit|[dw]grad|fprop|gemm|nvjet|conv\d*d?_",
    ),
    ("pool", r"select_and_scatter|reduce_window"),
]

# By a part of the path that names where an instruction came from.
_STAGES = frozenset(
    "cast_deep_grads reduce_deep cast_first_grads reduce_first digest_grads "
    "check_and_scale reconcile_stats commit_stats update update_ema cast_to_compute "
    "cast_ema_to_compute".split()
)
_PRODUCT = re.compile(r"(conv|dot)_general\w*")
_POOL = re.compile(r"(reduce_window|select_and_scatter|max_pool)\w*")
_LAYERS = re.compile(r"conv\d*|\w+_conv|head|hidden\d+|(Conv|Dense)_\d+")
_NORMS = re.compile(r"bn\d*|\w+_bn|BatchNorm_\d+")
_BLOCKS = re.compile(r"stem|stage\d+_(block|cbr)\d+|stage\d+")
_FORWARD = re.compile(r"jvp\(|forward_backward")

# What runs other instructions, whose own events are counted.
_WRAPPERS = ("while", "conditional", "call", "async-start", "async-done")


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel on the device, or one instruction on a CPU.

    Attributes:
        name: of the kernel.
        instruction: of the compiled program, "" if the profiler does not say.
        milliseconds: how long it ran.
    """

    name: str
    instruction: str
    milliseconds: float


def kind_of_path(path: str) -> str:
    """Return the category of an instruction by its `op_name`.

    Example:
        >>> kind_of_path("jit(f)/transpose(jvp(ResNet50))/stem/bn/mul")
        'norm'
    """
    parts = path.split("/")
    if _STAGES.intersection(parts):
        return "update"
    if any(_POOL.fullmatch(part) for part in parts):
        return "pool"
    if any(_NORMS.fullmatch(part) for part in parts):
        return "norm"
    if any(_PRODUCT.fullmatch(part) or _LAYERS.fullmatch(part) for part in parts):
        return "conv"
    if any(_BLOCKS.fullmatch(part) for part in parts):
        return "norm"
    # Without a stage's name: what is no part of the loss comes after its gradient.
    known = len(parts) > 1 and parts[0].startswith("jit(")
    return "update" if known and not _FORWARD.search(path) else "other"


def kind_of_kernel(name: str) -> str:
    """Return the category of a kernel by its name alone."""
    for kind, pattern in _KERNELS:
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "other"


def kinds_of(text: str) -> dict[str, str]:
    """Return the category of every instruction of a compiled program, by its name.

    Names are as kernels have them: letters, digits and underscores. What only runs
    other instructions has the category "".
    """
    program = hlo.parse(text)
    return {
        plain(name): _kind(instruction, program)
        for body in program.computations.values()
        for name, instruction in body.items()
    }


def _kind(instruction: hlo.Instruction, program: hlo.Program) -> str:
    if instruction.opcode in _WRAPPERS:
        return ""
    if instruction.opcode in ("convolution", "dot"):
        return "conv"
    named = kind_of_kernel(f"{instruction.target} {instruction.path}")
    if instruction.opcode == "custom-call" and named != "other":
        return named
    own = kind_of_path(instruction.path)
    inner = [i for i in program.fused(instruction) if i is not instruction]
    kinds = collections.Counter(_kind(i, program) for i in inner)
    if any(i.opcode in ("convolution", "dot") for i in inner):
        return "conv"
    if kinds["pool"] and kinds["norm"]:
        return "norm+pool"
    if own != "other":
        return own
    named = [kind for kind, _ in kinds.most_common() if kind not in ("other", "")]
    return named[0] if named else "other"


def plain(name: str) -> str:
    """Return a name as a kernel may have it.

    Example:
        >>> plain("loop_add_fusion.12")
        'loop_add_fusion_12'
    """
    return re.sub(r"\W", "_", name.lstrip("%"))


def kind_of(event: Event, kinds: Mapping[str, str]) -> str:
    """Return the category of an event, "" for one whose parts are counted."""
    ours = "rjax_" in event.name
    for name in () if ours else (event.instruction, event.name):
        kind = kinds.get(plain(name), "other")
        # On a GPU a wrapper (a command buffer) may be all that a kernel is said to be
        # of; on a CPU it is an event of its own, around those of its parts.
        if kind != "other" and (kind or plain(event.name) == plain(name)):
            return kind
    return kind_of_kernel(event.name)


def summarize(
    events: Iterable[Event], kinds: Mapping[str, str], steps: int
) -> dict[str, Any]:
    """Return milliseconds a step by category, and the kernels that take the most.

    These are `TOP` of all, and `TOP_EACH` of every category.
    """
    by_kind: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    kernels: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if kind := kind_of(event, kinds):
            by_kind[kind] += event.milliseconds / steps
            name = event.instruction or event.name
            if plain(event.name) != plain(name):
                name = f"{name} | {event.name}"
            kernels.setdefault((name, kind), []).append(event.milliseconds)
    ranked = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    before = collections.Counter[str]()
    top = []
    for i, item in enumerate(ranked):
        kind = item[0][1]
        if i < TOP or before[kind] < TOP_EACH:
            top.append(item)
        before[kind] += 1
    return {
        "ms": by_kind,
        "top": [
            {"name": name, "kind": kind, "ms": sum(ms) / steps, "runs": len(ms) / steps}
            for (name, kind), ms in top
        ],
    }


def read_events(data: Any) -> Iterator[Event]:
    """Yield the events of a `jax.profiler.ProfileData`, or of what looks like one.

    On a GPU all of its streams; where there is none, whatever names an instruction.
    """
    planes = list(data.planes)
    devices = [plane for plane in planes if "GPU" in plane.name]
    for plane in devices or planes:
        for line in plane.lines:
            if devices and "Stream" not in line.name:
                continue
            for event in line.events:
                instruction = _stat(event, "hlo_op")
                if devices or (instruction and not event.name.startswith("end: ")):
                    yield Event(event.name, instruction, event.duration_ns / 1e6)


def _stat(event: Any, key: str) -> str:
    for name, value in event.stats or ():
        if name == key:
            return str(value)
    return ""


def profile(step: Callable[[], Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Profile some steps, each of which blocks; return what `summarize` does."""
    import jax  # not by those who only read a profile

    step()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        wall = time.perf_counter() - start
        jax.profiler.stop_trace()
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not files:
            return {"failed": "the profiler wrote no xplane.pb"}
        data = jax.profiler.ProfileData.from_file(str(files[-1]))
        with warnings.catch_warnings():
            # Python 3.12 warns of a type of the reader; as an error, that aborts it.
            warnings.simplefilter("ignore", DeprecationWarning)
            found = summarize(read_events(data), kinds, STEPS)
    return found | {"wall_ms": 1e3 * wall / STEPS}


def lines(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a profile as text."""
    if "failed" in found:
        yield f"{name}: not profiled: {found['failed']}"
        return
    ms = found["ms"]
    parts = "  ".join(f"{kind} {ms[kind]:.2f}" for kind in CATEGORIES)
    yield f"{name}, ms a step: {parts}  sum {sum(ms.values()):.2f}"
    for row in found["top"]:
        runs = f"x{row['runs']:.3g}"
        text = f"  {row['ms']:8.3f} ms  {runs:5s} {row['kind']:9s} {row['name']}"
        yield text[:150]
