"""A run over several devices: each takes a share of every batch.

Of one device nothing here does anything: its arrays stay where JAX puts them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rjax
from rjax.ops import mosaic
from rjax.parallel import DataParallelStep, data_parallel, gather, replicate
from rjax.runs.errors import UsageError
from rjax.runs.options import TrainOptions

AXIS = "data"


def make_step(options: TrainOptions, loss_fn: Any, plan: rjax.Plan) -> Any:
    """Return the train step of a run, over the devices that it asks for.

    Raises:
        UsageError: for devices that are not there, a batch that they cannot share, or
            kernels that cannot run.
    """
    chosen = find_devices(options)
    grads = options.output.record_grads
    implementation = options.numerics.implementation
    if implementation == "mosaic_gpu" and (why := mosaic.why_not()):
        raise UsageError(
            f"--implementation mosaic_gpu cannot serve: {why}; leave it out"
        )
    if len(chosen) == 1:
        if options.devices.shard_optimizer:
            raise UsageError(
                "--shard-optimizer has nothing to share with one device: give "
                "--devices a number, or leave it out"
            )
        return rjax.make_train_step(loss_fn, plan, implementation, digest_grads=grads)
    _check_batch(options, len(chosen))
    return data_parallel(
        loss_fn,
        plan,
        Mesh(np.array(chosen), (AXIS,)),
        AXIS,
        shard_optimizer=options.devices.shard_optimizer,
        implementation=implementation,
        digest_grads=grads,
    )


def find_devices(options: TrainOptions) -> list[Any]:
    """Return the devices that `--devices` asks for.

    Raises:
        UsageError: if there are not so many, or several processes would leave some out.
    """
    found, wanted = jax.devices(), options.devices.devices
    if jax.process_count() > 1:
        if wanted not in (None, "all", str(len(found))):
            raise UsageError(
                f"--devices {wanted} would leave some of the {len(found)} devices of "
                f"{jax.process_count()} processes out: leave it out instead"
            )
        _check_alike(options)
        return found
    if wanted not in (None, "all") and not (wanted.isdecimal() and int(wanted) > 0):
        raise UsageError(f"--devices must be all or a number above 0, got {wanted}")
    count = {None: 1, "all": len(found)}.get(wanted) or int(wanted or 1)
    if count > len(found):
        raise UsageError(
            f"--devices {count} is more than the {len(found)} that JAX sees "
            f"({found[0].platform}): give {len(found)} or less"
            + _on_cpu(found[0].platform, count)
        )
    return found[:count]


def _check_alike(options: TrainOptions) -> None:
    """Refuse what would not go alike in several processes."""
    if options.loop.early_stop is not None:
        # Evaluations that differ in a bit would let one process stop alone.
        raise UsageError("--early-stop is for one process: leave it out")
    if options.output.snapshot_every and options.devices.shard_optimizer:
        raise UsageError(
            "--snapshot-every has no process that holds all of what --shard-optimizer "
            "cuts: leave out either"
        )


def _on_cpu(platform: str, count: int) -> str:
    if platform != "cpu":
        return ""
    return (
        ", or make a CPU look like several with "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
    )


def _check_batch(options: TrainOptions, devices: int) -> None:
    size, micro = options.loop.batch_size, options.update.accumulation_steps
    if size % (devices * micro):
        steps = f" times {micro} --accumulation-steps" if micro > 1 else ""
        raise UsageError(
            f"--batch-size {size} does not split into equal shares for {devices} "
            f"devices{steps}: make it a multiple of {devices * micro}"
        )


class Spread:
    """Where the arrays of a run lie.

    Args:
        step: from :func:`make_step`.
    """

    def __init__(self, step: Any) -> None:
        self._step = step if isinstance(step, DataParallelStep) else None

    def state(self, state: rjax.RegionState) -> rjax.RegionState:
        """Return a fresh state as the step takes it."""
        return state if self._step is None else self._step.place(state)

    def batch(self, batch: Any) -> Any:
        """Return a batch, or its shapes, shared out; every process has all of it."""
        if self._step is None:
            return batch
        spec = PartitionSpec(AXIS)
        sharding = NamedSharding(self._step.layout.mesh, spec)
        return jax.tree.map(functools.partial(_shared_out, sharding), batch)

    def everywhere(self, arrays: Any) -> Any:
        """Return arrays with a copy on every device."""
        if self._step is None:
            return arrays
        return replicate(arrays, self._step.layout.mesh)

    def program(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """Return a program of a step or an epoch that shares out what it is given.

        Its reports are those of one device: all have the same.
        """
        if self._step is None:
            return program

        def run(state: rjax.RegionState, *batch: Any) -> tuple[Any, Any]:
            state, report = program(state, *map(self.batch, batch))
            return state, jax.tree.map(_here, report)

        return run

    def whole(self, state: rjax.RegionState) -> rjax.RegionState:
        """Return a state as one device of this process has it, for evaluations.

        Their batches then go to that device alone.
        """
        return state if self._step is None else gather(self._step.plan, state)


def _shared_out(sharding: NamedSharding, x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def _here(x: jax.Array) -> jax.Array:
    return x.addressable_data(0)
