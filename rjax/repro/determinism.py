"""What JAX and XLA need, before they start, to give the same bits every time."""

from rjax.xla_flags import require

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
        First thing in a program:

        >>> import os, subprocess, sys
        >>> program = "import os, rjax; rjax.repro.deterministic()"
        >>> program += "; print(os.environ['XLA_FLAGS'])"
        >>> bare = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        >>> words = [sys.executable, "-c", program]
        >>> subprocess.check_output(words, env=bare, text=True).strip()
        '--xla_gpu_deterministic_ops=true'
    """
    require("deterministic", _FLAG, ("", "true", "1"))
