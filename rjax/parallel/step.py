"""The train step over the devices of a mesh."""

import dataclasses
import functools
from typing import Any, Literal

import jax
from jax.sharding import Mesh, PartitionSpec

from rjax import stages
from rjax.optim import OptaxOptimizer
from rjax.parallel import replicated, sharded
from rjax.parallel.checks import Axis, check_axes, check_share, check_state
from rjax.parallel.placement import Layout, automatic, place, shard_batch
from rjax.parallel.shards import Shards
from rjax.plan import Plan
from rjax.report import Report
from rjax.state import RegionState

BatchStatistics = Literal["global", "device"]


@dataclasses.dataclass(frozen=True, eq=False)
class DataParallelStep:
    """What :func:`data_parallel` makes: a pure function that knows its devices.

    Attributes:
        loss_fn: the loss function.
        layout: how its arrays lie on the devices.
        batch_statistics: what batch norms look at.
        implementation: of the range operations.
        digest_grads: whether the report has digests of the gradients.

    Example:
        >>> import jax, jax.numpy as jnp, rjax
        >>> params = {"w": jnp.ones((4, 2))}
        >>> plan = rjax.make_plan(params, rjax.Config())
        >>> loss_fn = rjax.stateless_loss(lambda p, x: jnp.float32(x @ p["w"]).mean())
        >>> state, x = rjax.init_state(plan, params), jnp.ones((3, 4), "float16")
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> step = rjax.parallel.data_parallel(loss_fn, plan, mesh)
        >>> state, report = jax.jit(step)(step.place(state), step.shard_batch(x))
        >>> float(report.loss)
        4.0
    """

    loss_fn: Any
    layout: Layout
    batch_statistics: BatchStatistics = "global"
    implementation: str | None = None
    digest_grads: bool = False

    # The name that programs have in profiles and dumps.
    __name__ = "train_step"

    @property
    def plan(self) -> Plan:
        """The static layout of the arenas."""
        return self.layout.plan

    def __call__(self, state: RegionState, batch: Any) -> tuple[RegionState, Report]:
        """Take one step; see :func:`data_parallel`."""
        layout = self.layout
        layout.check_context()
        check_state(layout.plan, state, layout.length)
        steps = layout.plan.config.accumulation_steps
        check_share(batch, layout.devices, steps)
        return self._over_devices(state, batch)

    def place(self, state: RegionState) -> RegionState:
        """Put a state on the devices, in buffers of its own.

        Replicated, or with its optimizer's arenas sharded, as the step wants it.

        Args:
            state: from :func:`rjax.init_state`, or of a step over any other devices.

        Raises:
            ValueError: for a state of another plan.

        Example:
            ``state = step.place(rjax.init_state(plan, params))``
        """
        return place(self.layout, state)

    def shard_batch(self, batch: Any) -> Any:
        """Give every device its share of a batch; see :func:`shard_batch`."""
        return shard_batch(batch, self.layout.mesh, self.layout.axes)

    # Compiled once for a call outside of jit too; inside, XLA sees through it.
    @functools.cached_property
    def _over_devices(self) -> Any:
        def train_step(state: RegionState, batch: Any) -> Any:
            layout, spread = self.layout, PartitionSpec(self.layout.axes)
            specs = layout.state_specs(state)
            state = layout.laid_out(state, specs)
            batch = layout.laid_out(batch, spread)
            # Without varying types a gradient is this device's own: with them, JAX
            # would add half-precision ones up before any cast.
            run = jax.shard_map(
                self._on_device,
                mesh=layout.mesh,
                in_specs=(specs, spread),
                out_specs=(specs, PartitionSpec()),
                check_vma=False,
            )
            with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
                return run(state, batch)

        return jax.jit(train_step)

    def _on_device(self, state: RegionState, batch: Any) -> tuple[RegionState, Report]:
        layout, plan, axes = self.layout, self.plan, self.layout.axes
        shared = self.batch_statistics == "global"
        loss_fn = replicated.on_device(self.loss_fn, axes, shared)
        flow = stages.begin(plan, state, batch, self.implementation)
        if not layout.shard_optimizer:
            return replicated.take_step(flow, loss_fn, axes, self.digest_grads)
        sizes = tuple(slot.size for slot in plan.slots)
        shards = Shards(plan.slot_table, sizes, layout.length, layout.devices, axes)
        return sharded.take_step(flow, loss_fn, shards, self.digest_grads)


def data_parallel(
    loss_fn: Any,
    plan: Plan,
    mesh: Mesh,
    axis: Axis = "data",
    *,
    shard_optimizer: bool = False,
    batch_statistics: BatchStatistics = "global",
    implementation: str | None = None,
    digest_grads: bool = False,
) -> DataParallelStep:
    """Make the train step over the devices of a mesh: ``step(state, batch)``.

    Equals :func:`rjax.make_train_step` on the whole batch, but for the order of float32
    sums and, with half gradients, their rounding on each device. Every device takes an
    equal share of the batch. Gradients become float32 before they are averaged, in two
    buckets of which the deep convolutions' need not wait for the first layer; then one
    flag decides for all devices. States and reports have the same bits on all of them.

    As with `make_train_step`, the step is pure and never raises on bad numbers: jit it
    with the state donated, scan it, or capture it (:func:`rjax.capture`).

    The loss function sees one device's share and returns the mean over that, and
    metrics: those that are floats or bools are averaged over devices, in float32, and
    integers summed. Its random key is another one on each device. With
    `accumulation_steps` each device makes micro-batches of its own share.

    Args:
        loss_fn: as for :func:`rjax.make_train_step`.
        plan: from :func:`rjax.make_plan`.
        mesh: of automatic or explicit axes, as from `jax.make_mesh`.
        axis: of the mesh, or several, to split the batch over: all that have more than
            one device.
        shard_optimizer: keep masters, momenta and EMA on the devices in ranges of
            equal length instead of whole on each. Gradients are then scattered to
            where their range is, as one bucket, and half copies gathered (in fp32, the
            masters at every step). The state has to be placed, by ``step.place``, and
            where the devices cannot take equal ranges its arenas are longer than the
            plan's; parameters, statistics and digests are read from it as ever. It
            lies on a mesh of automatic axes, whatever those of `mesh` are. For
            optimizers of :mod:`rjax.optim` other than `from_optax`.
        batch_statistics: batch norms of `rjax.nn` and `rjax.ops` without an
            `axis_name` of their own normalise by the "global" batch, or by the share
            of their "device". Running statistics that differ are averaged.
        implementation: of the range operations: `None` chooses, "xla" or "mosaic_gpu"
            insist; of a sharded optimizer's update there is "xla" only.
        digest_grads: as for :func:`rjax.make_train_step`.

    Returns:
        The step function. ``step.place(state)`` and ``step.shard_batch(batch)`` put
        what it takes on the devices.

    Raises:
        ValueError: for anything but a plan or a mesh, or axes that do not fit; when
            called, for a batch that devices and micro-batches do not divide, or a
            state of another plan.
        NotImplementedError: for a sharded optimizer from Optax.

    Example:
        >>> import jax.numpy as jnp, rjax
        >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> params = {"w": jnp.array([[8.0]])}
        >>> plan = rjax.make_plan(params, rjax.Config(optimizer=rjax.optim.sgd()))
        >>> loss_fn = rjax.stateless_loss(lambda p, x: jnp.mean(p["w"] * x))
        >>> step = data_parallel(loss_fn, plan, mesh)
        >>> jitted = jax.jit(step, donate_argnums=0)
        >>> state = step.place(rjax.init_state(plan, params))
        >>> batch = step.shard_batch(jnp.ones((4, 1), jnp.float16))
        >>> state, report = jitted(state, batch)
        >>> float(report.loss), rjax.get_params(plan, state)["w"].item()
        (8.0, 7.900000095367432)

    Source: the all-reduce of the article, section 4.2; `jax.shard_map` of JAX.
    """
    if not isinstance(plan, Plan):
        raise ValueError(
            f"`plan` must be an rjax.Plan, got {type(plan).__name__}; make one with "
            "`rjax.make_plan(params, config)`."
        )
    axes = check_axes(mesh, axis)
    if batch_statistics not in ("global", "device"):
        raise ValueError(
            "`batch_statistics` must be 'global' or 'device', got "
            f"{batch_statistics!r}."
        )
    if shard_optimizer and isinstance(plan.config.optimizer, OptaxOptimizer):
        raise NotImplementedError(
            "`shard_optimizer` cuts the arenas of rjax.optim's own optimizers; what a "
            "transformation from Optax keeps may be anything: leave it at False."
        )
    if shard_optimizer:
        # Ranges of an explicit type could not be cut into parameters.
        mesh = automatic(mesh)
    layout = Layout(plan, mesh, axes, shard_optimizer)
    return DataParallelStep(
        loss_fn, layout, batch_statistics, implementation, digest_grads
    )
