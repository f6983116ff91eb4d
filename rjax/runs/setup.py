"""From options to everything a run needs, with every complaint made up front."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

import rjax
from rjax.programs import Traced, trace
from rjax.runs import build
from rjax.runs.checks import check_options
from rjax.runs.errors import UsageError
from rjax.runs.options import PlanOptions, TrainOptions
from rjax.runs.schedules import build_schedule


@dataclasses.dataclass(frozen=True)
class Job:
    """What `rjax train` trains, ready to go.

    Attributes:
        options: as given.
        data: the whole set.
        train: the examples trained on.
        validation: those held out of them, if any.
        model: a Linen module.
        config: the pipeline's configuration.
        plan: the static layout.
        variables: the model's first parameters and statistics.
        traced: the traced step, to be compiled.
        steps_per_epoch: full batches in an epoch.
        learning_rate: the rate, or the highest of the schedule.
    """

    options: TrainOptions
    data: rjax.data.Dataset
    train: Any
    validation: Any
    model: Any
    config: rjax.Config
    plan: rjax.Plan
    variables: Any
    traced: Traced
    steps_per_epoch: int
    learning_rate: float

    @property
    def total_steps(self) -> int:
        """Number of steps that the run may take."""
        steps = self.steps_per_epoch * self.options.loop.epochs
        limit = self.options.loop.limit_steps
        return steps if limit is None else min(steps, limit)

    @property
    def watched(self) -> tuple[str, Any]:
        """Name and examples of the set that is evaluated while training."""
        if self.validation is not None:
            return "validation", self.validation
        return "test", self.data.test

    def batches(self) -> Generator[Any, None, None]:
        """Return the batches of the whole run, in order."""
        loop = self.options.loop
        return rjax.data.train_batches(
            self.train, loop.batch_size, loop.seed, start=0, stop=self.total_steps
        )

    def initial_state(self) -> rjax.RegionState:
        """Return a fresh state, to be given away to the first step."""
        return _initial_state(self.plan, self.variables, self.options.loop.seed)


def prepare_plan(options: PlanOptions) -> rjax.Plan:
    """Return the plan that `options` ask for."""
    check_options(options)
    shape, num_classes = build.shape_and_classes(options.source)
    with complaints_as_usage():
        config = build.build_config(options, build.base_rate(options.update, None))
        model = build.build_model(options.network, num_classes)
        # Shapes alone make a layout; nothing is computed.
        shapes = jax.eval_shape(
            model.init, jax.random.key(0), jnp.zeros((1, *shape), jnp.float32)
        )
        return _plan(config, shapes)


def prepare_job(options: TrainOptions) -> Job:
    """Return the job that `options` ask for, validated down to the traced step.

    Raises:
        UsageError: for anything that the caller has to change.
    """
    check_options(options)
    loop = options.loop
    data = build.load_data(options.source)
    train, validation = build.hold_out(data, loop)
    count = rjax.data.num_examples(train)
    if loop.batch_size > count:
        raise UsageError(
            f"--batch-size {loop.batch_size} is larger than the {count} training "
            f"images of {data.name}: give {count} or less"
        )
    per_epoch = rjax.data.steps_per_epoch(count, loop.batch_size)
    rate = build.base_rate(options.update, options.rate.learning_rate)
    schedule = build_schedule(options.rate, rate, per_epoch, loop.epochs)
    batch = rjax.data.batch_at(train, loop.batch_size, loop.seed, 0)
    with complaints_as_usage():
        config = build.build_config(options, schedule)
        model = build.build_model(options.network, data.num_classes)
        variables = _init(model, jax.random.key(loop.seed), batch[0][:1])
        plan = _plan(config, variables)
        loss_fn = rjax.linen_loss(model, make_criterion(loop.label_smoothing))
        step = rjax.make_train_step(
            loss_fn, plan, digest_grads=options.output.record_grads
        )
        state = _initial_state(plan, variables, loop.seed)
        traced = trace(step, state, batch)
    return Job(
        options, data, train, validation, model, config, plan, variables, traced,
        per_epoch, rate,
    )  # fmt: skip


def make_criterion(
    label_smoothing: float,
) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, Any]]:
    """Return the mean cross-entropy of a batch, and its accuracy as a metric."""

    def criterion(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        losses = rjax.ops.softmax_cross_entropy(logits, labels, label_smoothing)
        hits = jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels
        return losses.mean(), {"accuracy": hits.astype(jnp.float32).mean()}

    return criterion


# Compiled once per model: one by one, the initializers take longer than the training.
@functools.partial(jax.jit, static_argnums=0)
def _init(model: Any, key: jax.Array, images: jax.Array) -> Any:
    return model.init(key, images)


def _initial_state(plan: rjax.Plan, variables: Any, seed: int) -> rjax.RegionState:
    stats = variables.get("batch_stats")
    return rjax.init_state(plan, variables["params"], batch_stats=stats, seed=seed)


def _plan(config: rjax.Config, variables: Any) -> rjax.Plan:
    stats = variables.get("batch_stats")
    return rjax.make_plan(variables["params"], config, batch_stats=stats)


@contextmanager
def complaints_as_usage() -> Iterator[None]:
    """Turn rjax's `ValueError`s, which name the argument at fault, into usage errors.

    Only around validation: a `ValueError` out of a running step would be a bug.
    """
    try:
        yield
    except ValueError as error:
        raise UsageError(" ".join(str(error).split())) from error
