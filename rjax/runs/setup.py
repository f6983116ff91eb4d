"""From options to everything a run needs, with every complaint made up front."""

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

import rjax
from rjax.programs import Traced, capture_epoch, trace
from rjax.programs.sampling import Augment, Sampling
from rjax.runs import batches, build, devices
from rjax.runs.checks import check_options
from rjax.runs.errors import UsageError
from rjax.runs.normalization import Normalization
from rjax.runs.options import PlanOptions, SourceOptions, TrainOptions, with_values
from rjax.runs.schedules import build_schedule


@dataclasses.dataclass(frozen=True)
class Job:
    """What `rjax train` trains, ready to go.

    Attributes:
        options: in force.
        data: the whole set.
        train: the examples trained on; of whole epochs, as they lie on the device.
        validation: those held out of them, if any.
        model: a Linen module.
        config: the pipeline's configuration.
        plan: the static layout.
        variables: the model's first parameters and statistics.
        step: the train step.
        first: the first batch, or its shapes.
        augment: what changes training images at random, if anything.
        sampling: which examples a step takes, if whole epochs are one program.
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
    step: Any
    first: Any
    augment: Augment | None
    sampling: Sampling | None
    steps_per_epoch: int
    learning_rate: float

    @functools.cached_property
    def spread(self) -> devices.Spread:
        """Where the arrays of the run lie."""
        return devices.Spread(self.step)

    @functools.cached_property
    def traced(self) -> Traced:
        """The step, traced for the batches of the run."""
        first = self.spread.batch(self.first)
        return trace(self.step, self.initial_state(), first)

    @property
    def total_steps(self) -> int:
        """Number of steps that the run may take."""
        steps = self.steps_per_epoch * self.options.loop.epochs
        limit = self.options.loop.limit_steps
        return steps if limit is None else min(steps, limit)

    @property
    def epochs(self) -> int:
        """Number of epochs that the run may begin."""
        return -(-self.total_steps // self.steps_per_epoch)

    def evaluates(self, epoch: int) -> bool:
        """Return whether an epoch, counted from 1, ends in an evaluation."""
        every = self.options.loop.eval_every
        return every > 0 and (epoch % every == 0 or epoch == self.epochs)

    @property
    def watched(self) -> tuple[str, Any]:
        """Name and examples of the set that is evaluated while training."""
        if self.validation is not None:
            return "validation", self.validation
        return "test", self.data.test

    def compile(self) -> Callable[..., Any]:
        """Return the program of a step or, of whole epochs, that of an epoch."""
        if self.sampling is None:
            return self.spread.program(self.traced.compile())
        with complaints_as_usage():
            epoch = capture_epoch(
                self.step,
                self.initial_state(),
                self.spread.everywhere(self.train),
                self.sampling.batch_size,
                augment=self.sampling.augment,
                ahead=self.sampling.ahead,
                reports=True,
                every=self.options.output.record_every,
            )
        return self.spread.program(epoch)

    def gives_up(self, epoch: int, best: int) -> bool:
        """Return whether early stopping ends the run after an epoch.

        Args:
            epoch: its number, from 1.
            best: number of the epoch with the lowest loss until then.
        """
        loop = self.options.loop
        return loop.early_stop is not None and (
            epoch - best >= loop.early_stop * loop.eval_every
        )

    def batches(self, start: int = 0) -> Generator[Any, None, None]:
        """Return the batches from a step on, in order, for a step at a time."""
        seed, stop = self.options.loop.seed, self.total_steps
        if self.sampling is not None:
            assert not start, "whole epochs make their batches themselves"
            return batches.on_device(self.sampling, self.train, seed, stop)
        size, steps = self.options.loop.batch_size, range(start, stop)
        return batches.from_host(self.train, size, seed, steps, self.augment)

    def initial_state(self) -> rjax.RegionState:
        """Return a fresh state, to be given away to the first step."""
        seed = self.options.loop.seed
        return self.spread.state(_initial_state(self.plan, self.variables, seed))


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
    data, black = _images(options.source)
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
    first = rjax.data.batch_at(train, loop.batch_size, loop.seed, 0)
    with complaints_as_usage():
        config = build.build_config(options, schedule)
        model = build.build_model(options.network, data.num_classes)
        augment = build.build_augmentation(options.augment, black)
        variables = _init(model, jax.random.key(loop.seed), first[0][:1])
        plan = _plan(config, variables)
        loss_fn = rjax.linen_loss(model, make_criterion(loop.label_smoothing))
        step = devices.make_step(options, loss_fn, plan)
        sampling = None
        if loop.whole_epochs:
            train = batches.resident(train, config.policy.compute_dtype)
            batches.check_room((train, data.test, validation))
            options = _for_whole_epochs(options, per_epoch)
            sampling = _sampling(options, train, augment)
            first = batches.shapes(train, loop.batch_size)
        job = Job(
            options, data, train, validation, model, config, plan, variables, step,
            first, augment, sampling, per_epoch, rate,
        )  # fmt: skip
        if sampling is None:
            _ = job.traced  # complains now; of an epoch, that is part of compiling
    return job


def _images(source: SourceOptions) -> tuple[rjax.data.Dataset, tuple[float, ...]]:
    """Return the data as they are trained on, and what is black in them."""
    data = build.load_data(source)
    if source.normalize is None:
        return data, (0.0,)
    change = Normalization.preset(source.normalize)
    return change.dataset(data), change.offset


def _for_whole_epochs(options: TrainOptions, steps: int) -> TrainOptions:
    """Return options that whole epochs of so many steps can keep to."""
    limit = options.loop.limit_steps
    if limit is not None and limit % steps:
        raise UsageError(
            f"--limit-steps {limit} would end within an epoch of {steps} steps, and "
            "--whole-epochs takes whole ones: make it a multiple, or say "
            "--no-whole-epochs"
        )
    every = batches.digests_every(options.output.record_every, steps)
    return with_values(options, record_every=every)


def _sampling(options: TrainOptions, train: Any, augment: Augment | None) -> Sampling:
    images, labels = train
    size, ahead = options.loop.batch_size, 1
    if augment is not None:
        steps = rjax.data.steps_per_epoch(len(labels), size)
        every = options.output.record_every
        ahead = batches.steps_ahead(steps, every, images[:size].nbytes)
    return Sampling(len(labels), size, augment=augment, ahead=ahead)


def make_criterion(
    label_smoothing: float,
) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, Any]]:
    """Return the mean cross-entropy of a batch, and its accuracy as a metric."""

    def criterion(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        losses = rjax.ops.softmax_cross_entropy(logits, labels, label_smoothing)
        hits = jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels
        # Both means from one pass: in a small step every kernel counts.
        both = jnp.stack([losses, hits.astype(losses.dtype)])
        loss, accuracy = jnp.mean(both, axis=1)
        return loss, {"accuracy": accuracy}

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
