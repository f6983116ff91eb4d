"""Flags of XLA, which it reads once, when JAX starts."""

import os
from collections.abc import Mapping

import jax

# A plus adds to what XLA records into command buffers by itself.
_RECORDED = "+CONVOLUTION,+CUDNN,+CUBLAS,+CUBLASLT,+CUSTOM_CALL,+DYNAMIC_SLICE_FUSION"
DEFAULTS = {
    "--xla_gpu_enable_command_buffer": _RECORDED,
    "--xla_gpu_graph_min_graph_size": "1",
}


def set_xla_flags() -> None:
    """Let XLA launch a train step on a GPU in few calls of the host.

    Call it before the first computation; it adds to `XLA_FLAGS`, of which those that
    you have set stay as they are:

    - ``--xla_gpu_enable_command_buffer=+CONVOLUTION,…``: convolutions, and library
      calls of every kind, become parts of command buffers, which are launched as one.
    - ``--xla_gpu_graph_min_graph_size=1``: so does what stands alone.

    On an H200 a step of ResNet-50 at batch 256 takes 29.9 ms with these and 30.7
    without, and the host is done with a call in 2.5 ms and not 8.2; what was tried and
    is not set is in `benchmarks/RESULTS.md`. On a CPU they do nothing.

    Returns:
        Nothing; `XLA_FLAGS` of the process is changed.

    Raises:
        RuntimeError: if JAX has started already, on another platform than CPU, without
            these flags.

    Example:
        First thing in a program::

            import rjax

            rjax.set_xla_flags()

        What is there stays:

        >>> import os, subprocess, sys
        >>> code = "import os, rjax; rjax.set_xla_flags(); print(dict(os.environ))"
        >>> run = [sys.executable, "-c", code]
        >>> "graph_min_graph_size" in subprocess.check_output(run, text=True)
        True
    """
    given = _given()
    _add("set_xla_flags", {k: v for k, v in DEFAULTS.items() if k not in given})


def require(caller: str, flag: str, accepted: tuple[str, ...]) -> None:
    """Set a boolean flag, or make sure that it is set.

    Args:
        caller: who needs it, for the sentence.
        flag: its name, with the dashes.
        accepted: values that are as good as `"true"`.

    Raises:
        RuntimeError: if JAX has started already without the flag, or `XLA_FLAGS` says
            the contrary.
    """
    value = _given().get(flag)
    if value is None:
        _add(caller, {flag: "true"})
    elif value not in accepted:
        raise RuntimeError(
            f"XLA_FLAGS holds {flag}={value}; remove it, or set {flag}=true."
        )


def has_started() -> bool:
    """Return whether JAX has looked for devices, after which no flag is read."""
    from jax._src import xla_bridge  # no public name says it

    return xla_bridge.backends_are_initialized()


def _given() -> dict[str, str]:
    """Return the flags of `XLA_FLAGS`: the last of each counts."""
    words = os.environ.get("XLA_FLAGS", "").split()
    parts = (word.partition("=") for word in words)
    return {name: value for name, _, value in parts}


def _add(caller: str, flags: Mapping[str, str]) -> None:
    new = " ".join(f"{name}={value}" for name, value in flags.items())
    if not new:
        return
    if not has_started():
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {new}".strip()
    elif jax.default_backend() != "cpu":
        raise RuntimeError(
            f"{caller}() comes too late: JAX has started and reads no more flags; "
            f"call it before the first computation, or set XLA_FLAGS={new!r}."
        )
