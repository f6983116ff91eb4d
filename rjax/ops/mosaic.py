"""What every Mosaic GPU range kernel shares: can it run here, how it is launched."""

import contextlib
import contextvars
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rjax.ops import tuned

ROW = 128
_AXIS = "program"
Grid = int | tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class Mode:
    """How kernels run while :func:`mode` is in force.

    Attributes:
        target: "device"; "interpret", by JAX's interpreter, on any platform; "lower",
            only to be lowered for CUDA, on any platform.
        block: elements a program handles at a time, `None` to choose.
    """

    target: str = "device"
    block: int | None = None


_DEVICE = Mode()
_MODE = contextvars.ContextVar("rjax_mosaic_mode", default=_DEVICE)


@contextlib.contextmanager
def mode(target: str = "device", block: int | None = None) -> Iterator[None]:
    """Set the :class:`Mode` of kernels traced inside; for tests and benchmarks.

    What jit has traced before keeps the mode it was traced with.
    """
    token = _MODE.set(Mode(target, block))
    try:
        yield
    finally:
        _MODE.reset(token)


def current() -> Mode:
    """Return the mode in force."""
    return _MODE.get()


def why_not() -> str | None:
    """Return the sentence that says why no kernel can run here, or `None`."""
    if jax.__version_info__ < (0, 11):
        return (
            f"Mosaic GPU kernels need jax 0.11 or newer, this is jax {jax.__version__}"
        )
    return None if _MODE.get().target != "device" else _no_device()


@functools.cache
def _no_device() -> str | None:
    need = "Mosaic GPU kernels need an NVIDIA GPU of compute capability 8.0 or newer"
    if jax.default_backend() != "gpu":
        return f"{need}, the platform here is {jax.default_backend()!r}"
    device = jax.devices()[0]
    found = str(getattr(device, "compute_capability", None))
    major = found.split(".")[0]
    if not major.isdigit() or int(major) < 8:
        return f"{need}, this is {device.device_kind} ({found})"
    return None


def why_no_hopper() -> str | None:
    """Return the sentence that says why no kernel with products can run, or `None`."""
    if (sentence := why_not()) or _MODE.get().target != "device":
        return sentence
    device = jax.devices()[0]
    found = str(getattr(device, "compute_capability", None))
    if found.startswith("9."):
        return None
    return (
        "Mosaic GPU kernels with products need compute capability 9.x (Hopper), this "
        f"is {device.device_kind} ({found})"
    )


def block_size(
    op: str, n: int, largest: int = 2048, programs: int = 1056
) -> int:  # fmt: skip
    """Return how many elements a program handles at a time.

    What was measured to be best here, else the largest power of two that still gives
    every multiprocessor something to do.

    Args:
        op: what to look up in the table of measurements.
        n: length of the range.
        largest: upper limit, where registers or bandwidth saturate.
        programs: how many programs are wanted before blocks grow.

    Example:
        >>> block_size("new", 1000), block_size("new", 1 << 28)
        (128, 2048)
    """
    mode = _MODE.get()
    if mode.block is not None:
        return mode.block
    known = tuned.block(op, n) if mode.target == "device" else None
    if known is not None:
        return known
    block = ROW
    while block < largest and block * 2 * programs <= n:
        block *= 2
    return block


def program_index() -> jax.Array:
    """Return i32[], which program of the grid this is."""
    return lax.axis_index(_AXIS)


ZERO = np.zeros((1,), np.int32)


def rounding(zero: Any) -> Callable[[Any, Any], Any]:
    """Return a function (a, b) -> a * b, rounded: no later sum is contracted with it.

    The assembler contracts products with sums, XLA on GPU does not. It has to take
    the bits of a product for changed by a zero that it cannot know. The interpreter
    leaves it to XLA on CPU, which contracts the kernel as it contracts the base.

    Args:
        zero: reference to :data:`ZERO`, an operand of the kernel.
    """
    if _MODE.get().target == "interpret":
        return operator.mul
    nothing = zero[0]

    def times(a: Any, b: Any) -> Any:
        product = a * b
        row = product if product.ndim else jnp.full((ROW,), product)
        bits = lax.bitcast_convert_type(row, jnp.int32)
        bits ^= jnp.broadcast_to(nothing, bits.shape)
        row = lax.bitcast_convert_type(bits, jnp.float32)
        return row if product.ndim else jnp.max(row)  # it bitcasts no scalars

    return times


@dataclasses.dataclass(frozen=True)
class _Body:
    """A kernel's body with its options: equal to those that do the same."""

    run: Callable[..., None]
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, body: Any) -> Any:
        """Return the body as one of these if it is a `functools.partial`."""
        if not isinstance(body, functools.partial):
            return body
        assert not body.args, "options of a kernel are given by name"
        options = {name: cls.of(value) for name, value in body.keywords.items()}
        return cls(body.func, tuple(options.items()))

    def __call__(self, *references: Any) -> None:
        """Do what the `functools.partial` does."""
        self.run(*references, **dict(self.options))


def launch(
    body: Callable[..., None], name: str, programs: Grid, out: Any, *operands: Any
) -> Any:
    """Run a kernel over a grid.

    Args:
        body: of input and output references.
        name: stable name of the kernel, in the program and in profiles.
        programs: size of the grid, or names and sizes of its axes.
        out: `ShapeDtypeStruct`, or a list of them.
        *operands: arrays.

    Returns:
        An array, or a list of them, that vary over the operands' manual mesh axes.
    """
    shapes = tuple(out) if isinstance(out, list) else out
    run = _traced_once(_Body.of(body), name, programs, shapes, _MODE.get())
    found = run(*operands)
    axes = varying_axes(*operands)
    return jax.tree.map(lambda x: lax.pcast(x, axes, to="varying"), found)


def _kernel(
    body: Callable[..., None], name: str, programs: Grid, out: Any
) -> Callable[..., Any]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    axes = ((_AXIS, programs),) if isinstance(programs, int) else programs
    interpret = None
    if _MODE.get().target == "interpret":
        interpret = getattr(plgpu, "InterpretGPUParams")()  # noqa: B009  # jax >= 0.11
    return plgpu.kernel(
        body,
        out_type=out,
        grid=tuple(size for _, size in axes),
        grid_names=tuple(axis for axis, _ in axes),
        kernel_name=name,
        interpret=interpret,
    )


@functools.cache
def _traced_once(
    body: _Body, name: str, programs: Grid, out: Any, mode: Mode
) -> Callable[..., Any]:
    """Return a kernel as a function that a program holds once, however often it calls.

    A network has a hundred norms of a dozen shapes: otherwise each would be traced,
    lowered and compiled by itself.
    """
    del mode  # what is traced depends on it
    shapes = list(out) if isinstance(out, tuple) else out
    return jax.jit(_kernel(body, name, programs, shapes))


def launch_in_place(
    body: Callable[..., None], name: str, programs: int, moved: Any, *operands: Any
) -> Any:
    """Run a kernel that moves some arrays in place: it has no other output.

    Args:
        body: of references to the operands, then to the leaves of `moved`.
        name: stable name of the kernel, in the program and in profiles.
        programs: size of the grid.
        moved: pytree of arrays; XLA copies what the caller still needs.
        *operands: arrays that the kernel only reads.

    Returns:
        The pytree of arrays as the kernel left them.
    """
    from jax.experimental import pallas as pl

    def run(references: Any) -> None:
        _kernel(body, name, programs, [])(*operands, *jax.tree.leaves(references))

    # Not `jax.new_ref`: its effect does not pass through custom_jvp or custom_vmap.
    return pl.run_state(run)(moved)


def varying_reference(*arrays: jax.Array | None) -> str | None:
    """Return the sentence that says why no kernel moves these in place, or `None`."""
    axes = varying_axes(*(x for x in arrays if x is not None))
    if not axes:
        return None
    return f"it works in place, which arrays varying over {axes} do not allow"


def varying_axes(*arrays: Any) -> tuple[str, ...]:
    """Return the manual mesh axes that any of the arrays varies over, sorted."""
    axes = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    return tuple(sorted(frozenset[str]().union(*axes)))
