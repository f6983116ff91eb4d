"""Reading a compiled program: its instructions, where they came from, what they move.

XLA's text is the one form of a program that every version of JAX gives.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?<=[\s})\]])([a-z][a-z\-]*)\(")
_ARRAY = re.compile(r"\b(pred|bf16|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

# What moves nothing: names for parts of what is there, and what the compiler knows.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id "
    "replica-id async-done fusion-done copy-done all-reduce-done all-gather-done "
    "collective-permute-done".split()
)
# Parts of a path that only an extraordinary step takes.
RARE = frozenset({"skip", "second_look"})
_RUNS_OTHERS = frozenset({"while", "conditional", "call", "async-start"})


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a compiled program.

    Attributes:
        name: its name within its computation.
        opcode: such as "fusion" or "custom-call".
        path: where it came from, such as "jit(train_step)/update/mul"; "" if unsaid.
        target: of a custom call, "" of others.
        called: the computations that it runs or fuses.
        operands: names of the instructions whose results it reads.
        nbytes: of its result.
        trips: how often a loop runs, as far as XLA knows, else 1.
        line: its text.
    """

    name: str
    opcode: str
    path: str
    target: str
    called: tuple[str, ...]
    operands: tuple[str, ...]
    nbytes: int
    trips: int
    line: str


Body = Mapping[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Program:
    """The computations of a compiled program.

    Attributes:
        computations: {name: {name: instruction}}, in the order of the text.
        entry: name of the computation that a call runs.
    """

    computations: Mapping[str, Body]
    entry: str

    def launched(self, name: str | None = None) -> Iterator[tuple[Instruction, int]]:
        """Yield what a call runs, and how often: kernels, copies, library calls.

        Of the branches of a conditional, one that is not of `RARE`, and of several the
        one that moves the most. A loop counts as often as XLA knows that it runs.
        """
        for instruction in self.computations[name or self.entry].values():
            if instruction.opcode in FREE:
                continue
            bodies = [c for c in instruction.called if c in self.computations]
            if instruction.opcode not in _RUNS_OTHERS or not bodies:
                yield instruction, 1
                continue
            runs = [list(self.launched(body)) for body in bodies]
            for inner, times in max(runs, key=self._weight):
                yield inner, times * instruction.trips

    def _weight(self, runs: Sequence[tuple[Instruction, int]]) -> tuple[bool, int]:
        paths = (inner.path for i, _ in runs for inner in self.fused(i))
        rare = any(not RARE.isdisjoint(path.split("/")) for path in paths)
        return not rare, sum(times * self.moved(i) for i, times in runs)

    def fused(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield an instruction and all that it fuses."""
        yield instruction
        for called in instruction.called:
            for inner in self.computations.get(called, {}).values():
                yield from self.fused(inner)

    @functools.cached_property
    def _where(self) -> Mapping[int, Body]:
        return {
            id(instruction): body
            for body in self.computations.values()
            for instruction in body.values()
        }

    def moved(self, instruction: Instruction) -> int:
        """Return the bytes of its operands, each once, and of its result."""
        body = self._where[id(instruction)]
        read = {name for name in instruction.operands if name in body}
        return instruction.nbytes + sum(body[name].nbytes for name in read)


def parse(text: str) -> Program:
    """Return the instructions of every computation in a compiled program's text.

    Example:
        >>> import jax
        >>> text = jax.jit(lambda x: x * x).lower(1.0).compile().as_text()
        >>> program = parse(text)
        >>> [program.moved(instruction) for instruction, _ in program.launched()]
        [8]
    """
    found: dict[str, dict[str, Instruction]] = {}
    entry, body = "", {}
    for line in text.splitlines():
        if head := _HEAD.match(line):
            body = found.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif (match := _LINE.match(line)) and (op := _OPCODE.search(match[2])):
            body[match[1]] = _instruction(match[1], match[2], op)
    return Program(found, entry)


def _instruction(name: str, rest: str, op: re.Match[str]) -> Instruction:
    inside = _inside(rest, op.end())
    after = rest[op.end() + len(inside) :]
    trips = _TRIPS.search(after)
    called = (
        part
        for match in _CALLED.finditer(after)
        for part in re.findall(r"[\w.\-]+", match[2])
    )
    return Instruction(
        name=name,
        opcode=op[1],
        path=_quoted("op_name", after),
        target=_quoted("custom_call_target", after),
        called=tuple(called),
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        nbytes=array_bytes(rest[: op.start()]),
        trips=int(trips[1]) if trips else 1,
        line=rest,
    )


def _inside(text: str, start: int) -> str:
    """Return what stands between a parenthesis that ends at `start` and its partner."""
    end = text.find(")", start)
    if "(" not in text[start:end]:
        return text[start:end]
    depth = 1
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if not depth:
            return text[start:i]
    return text[start:]


def _quoted(key: str, text: str) -> str:
    match = re.search(rf'{key}="([^"]*)"', text)
    return match[1] if match else ""


def array_bytes(kind: str) -> int:
    """Return the bytes of all arrays in an HLO type.

    Example:
        >>> array_bytes("(f32[2,3]{1,0}, pred[], f8e4m3fn[4], token[])")
        29
    """
    total = 0
    for name, bits, dims in _ARRAY.findall(kind):
        width = 8 if name == "pred" else 16 if name == "bf16" else int(bits)
        size = math.prod(int(d) for d in dims.split(",") if d)
        total += -(-size * width // 8)
    return total
