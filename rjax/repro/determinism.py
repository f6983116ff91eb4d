"""What JAX and XLA need, before they start, to give the same bits every time."""

import os

import jax

_FLAG = "--xla_gpu_deterministic_ops"


def deterministic() -> None:
    """Make this process give the same bits as any other that runs the same program.

    Call it before the first computation; it adds ``--xla_gpu_deterministic_ops=true``
    to `XLA_FLAGS`, which XLA reads once, when it starts. On GPU, XLA otherwise picks
    kernels by timing them, so two processes may pick two that add in another order;
    with the flag it takes fixed ones, and none that adds by atomics. That can cost
    speed. On CPU nothing is needed.

    What is promised then: the same program (plan, config, model, batch shapes), data
    and seed, on the same kind and number of devices, with the same versions of jax,
    jaxlib and driver, gives the same bits in every state and report. Not promised: the
    same bits on other devices, or for other versions. rjax's own kernels use no
    atomics and keep that promise with or without the flag.

    Raises:
        RuntimeError: if JAX has started already without the flag, or `XLA_FLAGS` says
            the contrary.

    Example:
        First thing in a program::

            import rjax

            rjax.repro.deterministic()
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    mine = [flag for flag in flags if flag.split("=")[0] == _FLAG]
    if mine:
        if mine[-1] not in (_FLAG, f"{_FLAG}=true", f"{_FLAG}=1"):
            raise RuntimeError(
                f"XLA_FLAGS holds {mine[-1]}; remove it, or set {_FLAG}=true."
            )
        return
    if not has_started():
        os.environ["XLA_FLAGS"] = " ".join([*flags, f"{_FLAG}=true"])
    elif jax.default_backend() != "cpu":
        raise RuntimeError(
            "deterministic() comes too late: JAX has started and reads no more flags; "
            f"call it before the first computation, or set XLA_FLAGS={_FLAG}=true."
        )


def has_started() -> bool:
    """Return whether JAX has looked for devices, after which no flag is read."""
    from jax._src import xla_bridge  # no public name says it

    return xla_bridge.backends_are_initialized()
