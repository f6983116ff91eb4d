"""When the buckets are reduced, relative to the backward pass of the first layer.

Kernels of JAX's profiler, of every device, with the time at which they began. A kernel
belongs to an instruction of the compiled program, whose metadata say what it is:

- deep, first: the reductions of the buckets of those names;
- stats: every other exchange between devices, such as those within batch norms;
- last: the convolutions of the backward pass of the layer that reads the input;
- compute: everything else.
"""

import collections
import dataclasses
import pathlib
import re
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from throughput import profiling

from rjax.programs import hlo

STEPS = 5
_COLLECTIVE = re.compile(
    r"(all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(-start)?"
)
_BUCKETS = {"reduce_deep": "deep", "reduce_first": "first"}
_BY_NAME = re.compile(r"nccl|all_?reduce_?kernel|multimem", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel on a device, or one instruction on a CPU.

    Attributes:
        device: its number.
        name: of the kernel.
        instruction: of the compiled program, "" if the profiler does not say.
        start: in milliseconds.
        end: in milliseconds.
    """

    device: int
    name: str
    instruction: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Roles:
    """What the instructions of a program are.

    Attributes:
        of: {name: role}, of those that are not compute, "" for what runs others.
        nbytes: {role: bytes that the devices reduce}.
        last: name of the layer that reads the input.
        order: roles of all collectives, in the order in which the program begins them.
    """

    of: Mapping[str, str]
    nbytes: Mapping[str, int]
    last: str
    order: tuple[str, ...] = ()


def first_layer(plan: Any) -> str:
    """Return the path of the module that reads the input: the narrowest kernel's.

    Of the four-dimensional ones, that with the fewest input channels.
    """
    kernels = [slot for slot in plan.slots if len(slot.shape) == 4]
    slot = min(kernels, key=lambda slot: slot.shape[2])
    return slot.path.rpartition("/")[0]


def roles_of(text: str, plan: Any) -> Roles:
    """Return the roles of the instructions of a compiled step."""
    program, layer = hlo.parse(text), first_layer(plan)
    kinds = profiling.kinds_of(text)
    roles: dict[str, str] = {}
    sizes: dict[str, list[int]] = collections.defaultdict(list)
    order: list[str] = []
    entry = program.computations[program.entry]
    for body in program.computations.values():
        users = _users(body)
        for name, instruction in body.items():
            near = [instruction, *users.get(name, ())]
            role = _role(near, program, kinds, layer)
            if role is None:
                continue
            roles[profiling.plain(name)] = role
            if body is entry and _is_collective(instruction, program):
                order.append(role)
            if role in _BUCKETS.values():
                sizes[role].append(_moved(instruction, body))
    nbytes = {role: sum(found) for role, found in sizes.items()}
    return Roles(roles, nbytes, layer, tuple(order))


def _role(
    near: Sequence[hlo.Instruction], program: hlo.Program, kinds: Any, layer: str
) -> str | None:
    """Return the role of the first of some instructions; the others read it."""
    instruction, *users = near
    kind = kinds.get(profiling.plain(instruction.name))
    if _is_collective(instruction, program):
        parts = [part for path in _paths(instruction, program) for part in path]
        found = [_BUCKETS[part] for part in parts if part in _BUCKETS]
        return found[0] if found else "stats"
    if kind == "":
        return ""
    if kind != "conv":
        return None
    # On a CPU a convolution of a backward pass has lost its name; who reads it has not.
    named = [instruction] if instruction.path else users
    paths = [path for i in named for path in _paths(i, program)]
    return "last" if any(_is_backward(path, layer) for path in paths) else None


def _is_backward(path: Sequence[str], layer: str) -> bool:
    text = "/".join(path)
    return "transpose(" in text and f"/{layer}/" in f"{text}/"


def _users(body: hlo.Body) -> dict[str, list[hlo.Instruction]]:
    found: dict[str, list[hlo.Instruction]] = collections.defaultdict(list)
    for instruction in body.values():
        for name in instruction.operands:
            found[name].append(instruction)
    return found


def _is_collective(instruction: hlo.Instruction, program: hlo.Program) -> bool:
    if _COLLECTIVE.fullmatch(instruction.opcode):
        return True
    started = instruction.opcode == "async-start"
    return started and any(
        _COLLECTIVE.fullmatch(inner.opcode) for inner in program.fused(instruction)
    )


def _paths(instruction: hlo.Instruction, program: hlo.Program) -> list[list[str]]:
    """Return the paths of an instruction and of all that it fuses, in parts."""
    inner = program.fused(instruction) if instruction.called else ()
    return [i.path.split("/") for i in (instruction, *inner)]


def _moved(instruction: hlo.Instruction, body: hlo.Body) -> int:
    """Return the bytes that go into a collective."""
    return sum(body[name].nbytes for name in instruction.operands if name in body)


def read_events(data: Any) -> Iterator[Event]:
    """Yield the events of a `jax.profiler.ProfileData`, or of what looks like one."""
    planes = list(data.planes)
    devices = [plane for plane in planes if "GPU" in plane.name]
    for plane in devices or planes:
        for line in plane.lines:
            if devices and "Stream" not in line.name:
                continue
            for event in line.events:
                stats = {key: str(value) for key, value in event.stats or ()}
                instruction = stats.get("hlo_op", "")
                if devices:
                    device = int(re.findall(r"\d+", plane.name)[-1])
                elif instruction and not event.name.startswith("end: "):
                    device = int(stats.get("device_ordinal", 0))
                else:
                    continue
                start = event.start_ns / 1e6
                end = start + event.duration_ns / 1e6
                yield Event(device, event.name, instruction, start, end)


def role_of(event: Event, roles: Roles) -> str:
    """Return the role of an event, "" for one whose parts are events too."""
    for name in (event.instruction, event.name):
        role = roles.of.get(profiling.plain(name))
        if role == "" and profiling.plain(event.name) == profiling.plain(name):
            return ""
        if role:
            return role
    # In a command buffer, a kernel may be all that is known.
    return "stats" if _BY_NAME.search(event.name) else "compute"


def _in_turn(events: Sequence[Event], roles: Roles, steps: int) -> dict[Event, str]:
    """Return the roles of kernels between devices that are known by name only.

    NCCL's do not say which instruction they belong to; but a device runs them in the
    order of the program, once in every step. Where their number is another, none.
    """
    found: dict[int, list[Event]] = collections.defaultdict(list)
    for event in events:
        known = roles.of.get(profiling.plain(event.instruction))
        if not known and _BY_NAME.search(event.name):
            found[event.device].append(event)
    told = {}
    for own in found.values():
        if len(own) == steps * len(roles.order):
            own.sort(key=lambda event: event.start)
            told |= dict(zip(own, roles.order * steps, strict=True))
    return told


def summarize(events: Iterable[Event], roles: Roles, steps: int) -> dict[str, Any]:
    """Return, for every device and bucket, medians over steps, and one timeline."""
    found: dict[int, dict[str, list[Event]]] = {}
    every = list(events)
    told = _in_turn(every, roles, steps)
    for event in every:
        role = told.get(event) or role_of(event, roles)
        if role:
            by_role = found.setdefault(event.device, collections.defaultdict(list))
            by_role[role].append(event)
    devices = {str(k): _of_device(found[k], roles, steps) for k in sorted(found)}
    return {"layer": roles.last, "nbytes": dict(roles.nbytes), "devices": devices}


def _of_device(
    by_role: Mapping[str, list[Event]], roles: Roles, steps: int
) -> dict[str, Any]:
    if not by_role.get("last"):
        return {"failed": f"no kernel of the backward pass of {roles.last} was seen"}
    busy = merged([*by_role.get("compute", ()), *by_role["last"]])
    last = in_steps(by_role["last"], steps)
    buckets = {}
    for bucket in _BUCKETS.values():
        runs = in_steps(by_role.get(bucket, ()), steps)
        if len(runs) == len(last):
            rows = [_row(*pair, busy) for pair in zip(runs, last, strict=True)]
            keys = rows[0]
            buckets[bucket] = {k: statistics.median(r[k] for r in rows) for k in keys}
    return {"buckets": buckets, "timeline": _timeline(by_role, last)}


def _row(
    runs: Sequence[Event], last: Sequence[Event], busy: Sequence[tuple[float, float]]
) -> dict[str, float]:
    """Return one step's times of a bucket, in milliseconds."""
    start, end = min(e.start for e in runs), max(e.end for e in runs)
    took = sum(b - a for a, b in merged(runs))
    covered = sum(shared(a, b, busy) for a, b in merged(runs))
    return {
        "ms": took,
        "before_first_layer_begins": min(e.start for e in last) - start,
        "before_first_layer_ends": max(e.end for e in last) - start,
        "ends_after_first_layer": end - max(e.end for e in last),
        "covered": covered / took if took else 0.0,
    }


def in_steps(events: Sequence[Event], steps: int) -> list[list[Event]]:
    """Return the events of every step: each instruction has as many in all of them.

    Those of instructions whose number the steps do not divide are left out.
    """
    named: dict[str, list[Event]] = collections.defaultdict(list)
    for event in sorted(events, key=lambda event: event.start):
        named[event.instruction or event.name].append(event)
    cut: list[list[Event]] = [[] for _ in range(steps)]
    for found in named.values():
        each, rest = divmod(len(found), steps)
        if not rest:
            for i, event in enumerate(found):
                cut[i // each].append(event)
    return [step for step in cut if step]


def merged(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Return the times at which any of the events runs, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted((event.start, event.end) for event in events):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def shared(start: float, end: float, busy: Sequence[tuple[float, float]]) -> float:
    """Return how much of an interval lies in others, which do not overlap."""
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in busy)


def _timeline(
    by_role: Mapping[str, list[Event]], last: Sequence[Sequence[Event]]
) -> dict[str, list[list[float]]]:
    """Return when each role ran, from the end of the last step but one on.

    In milliseconds relative to the end of the first layer's backward pass.
    """
    zero = max(event.end for event in last[-1])
    begin = max((e.end for e in last[-2]), default=0.0) if len(last) > 1 else 0.0
    return {
        role: [
            [round(a - zero, 4), round(b - zero, 4)]
            for a, b in merged(e for e in events if e.start >= begin)
        ]
        for role, events in by_role.items()
    }


def profile(
    step: Callable[[], Any], roles: Roles, devices: int, steps: int = STEPS
) -> dict[str, Any]:
    """Profile some steps, each of which blocks; return what `summarize` does."""
    import jax  # not by those who only read a profile

    step()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        for _ in range(steps):
            step()
        jax.profiler.stop_trace()
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not files:
            return {"failed": "the profiler wrote no xplane.pb"}
        data = jax.profiler.ProfileData.from_file(str(files[-1]))
        with warnings.catch_warnings():
            # Python 3.12 warns of a type of the reader; as an error, that aborts it.
            warnings.simplefilter("ignore", DeprecationWarning)
            found = summarize(read_events(data), roles, steps)
    return found | {"count": devices}


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a profile as text."""
    if "failed" in found:
        yield f"not profiled: {found['failed']}"
        return
    n = found["count"]
    for device, of in found["devices"].items():
        if "failed" in of:
            yield f"device {device}: {of['failed']}"
            continue
        for bucket, row in of["buckets"].items():
            yield f"device {device}, {_sentence(bucket, row, found, n)}"
        for bucket in set(_BUCKETS.values()) - of["buckets"].keys():
            yield f"device {device}: no kernel of the {bucket} bucket was seen"


def _sentence(bucket: str, row: Mapping[str, float], found: Any, n: int) -> str:
    nbytes, early = found["nbytes"].get(bucket, 0), row["before_first_layer_ends"]
    order = "before" if early > 0 else "after"
    bus = 2 * (n - 1) / n * nbytes / (row["ms"] * 1e6) if row["ms"] else 0.0
    return (
        f"{bucket} bucket of {nbytes / 1e6:.1f} MB: begins {abs(early):.3f} ms {order} "
        f"the backward pass of {found['layer']} ends, takes {row['ms']:.3f} ms "
        f"(bus {bus:.1f} GB/s, waiting included), {row['covered']:.0%} of it beside "
        f"other kernels, ends {row['ends_after_first_layer']:+.3f} ms from there"
    )
