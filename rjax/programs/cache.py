"""Compiled programs kept on disk, so that the next process does not compile again."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from rjax.ops.tuned import user_folder

_FOLDER = "jax_compilation_cache_dir"


def enable_compilation_cache(folder: str | os.PathLike[str] | None = None) -> Path:
    """Keep every program that this process compiles, and reuse those kept before.

    Switches on JAX's persistent compilation cache for the rest of the process, small
    programs included. XLA looks a program up by everything that goes into it, versions,
    flags and device among that, so a stale one is never found; on a GPU the kernels
    that autotuning has picked are kept with it, and with them the bits.

    Programs in the cache run as they are: use no folder that others may write to.

    Args:
        folder: where to keep them, made if missing; `None` takes the folder that JAX is
            configured for already (`JAX_COMPILATION_CACHE_DIR`), else
            `~/.cache/rjax/xla` (below `XDG_CACHE_HOME` where that is set).

    Returns:
        The folder.

    Raises:
        ValueError: if no folder can be made there.

    Example:
        First thing in a program, here with a folder that is none:

        >>> import os, rjax
        >>> rjax.enable_compilation_cache(os.devnull)
        Traceback (most recent call last):
        ValueError: ...

    Source: `jax_compilation_cache_dir` of JAX.
    """
    known: str | None = getattr(jax.config, _FOLDER)
    path = Path(folder or known or default_folder()).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`{path}` cannot hold a compilation cache ({error.strerror}); give a "
            "folder that can be written to."
        ) from None
    if known != str(path):
        jax.config.update(_FOLDER, str(path))
        # JAX decides once whether there is a cache, at its first compilation.
        compilation_cache.reset_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def default_folder() -> Path:
    """Return the folder of this user's compiled programs."""
    return user_folder().with_name("xla")
