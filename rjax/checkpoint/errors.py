"""What goes wrong with checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says why and what to do.

    Example:
        >>> import jax.numpy as jnp, rjax
        >>> plan = rjax.make_plan({"w": jnp.ones((3, 2))}, rjax.Config())
        >>> try:
        ...     rjax.checkpoint.restore("no/such/folder", plan)
        ... except rjax.checkpoint.CheckpointError as error:
        ...     print(error)
        no/such/folder ...
    """


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written, or was never written to its end.

    Example:
        >>> import pathlib, tempfile, jax.numpy as jnp, rjax
        >>> params, folder = {"w": jnp.ones((3, 2))}, pathlib.Path(tempfile.mkdtemp())
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> rjax.checkpoint.save(folder, plan, rjax.init_state(plan, params))
        >>> files = [path for path in folder.rglob("*") if path.is_file()]
        >>> largest = max(files, key=lambda path: path.stat().st_size)
        >>> _ = largest.write_bytes(b"cut off")
        >>> try:
        ...     rjax.checkpoint.restore(folder, plan, step=0)
        ... except rjax.checkpoint.DamagedError as error:
        ...     print(error)
        /.../0 is damaged...
    """
