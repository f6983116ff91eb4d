"""From options to everything a run needs, with every complaint made up front."""

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

import rjax
from rjax.runs import options as opts
from rjax.runs.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Job:
    """What `rjax train` trains, ready to go.

    `lowered` is the traced step, to be compiled; it takes its state over.
    """

    options: opts.TrainOptions
    data: rjax.data.Dataset
    model: Any
    config: rjax.Config
    plan: rjax.Plan
    variables: Any
    lowered: Any
    steps_per_epoch: int

    @property
    def total_steps(self) -> int:
        """Number of steps over all epochs."""
        return self.steps_per_epoch * self.options.epochs

    def batch(self, index: int) -> Any:
        """Return the batch of step `index`, counted from 0 over all epochs."""
        size, seed = self.options.batch_size, self.options.seed
        return rjax.data.batch_at(self.data.train, size, seed, index)

    def initial_state(self) -> rjax.RegionState:
        """Return a fresh state, to be given away to the first step."""
        return rjax.init_state(
            self.plan,
            self.variables["params"],
            batch_stats=self.variables.get("batch_stats"),
            seed=self.options.seed,
        )


def prepare_plan(options: opts.PlanOptions) -> rjax.Plan:
    """Return the plan that `options` ask for."""
    opts.check_options(options)
    data = opts.load_data(options)
    with _complaints_as_usage():
        config = opts.build_config(options, total_steps=1)
        model = opts.build_model(options, data.num_classes)
        return _plan(config, _init(model, data, options.seed))


def prepare_job(options: opts.TrainOptions) -> Job:
    """Return the job that `options` ask for, validated down to the traced step.

    Raises:
        UsageError: for anything that the caller has to change.
    """
    opts.check_options(options)
    data = opts.load_data(options)
    count = len(data.train[1])
    if options.batch_size > count:
        raise UsageError(
            f"--batch-size {options.batch_size} is larger than the {count} training "
            f"images of {data.name}: give {count} or less"
        )
    per_epoch = rjax.data.steps_per_epoch(count, options.batch_size)
    with _complaints_as_usage():
        config = opts.build_config(options, per_epoch * options.epochs)
        model = opts.build_model(options, data.num_classes)
        variables = _init(model, data, options.seed)
        plan = _plan(config, variables)
        step = rjax.make_train_step(rjax.linen_loss(model, criterion), plan)
        job = Job(options, data, model, config, plan, variables, None, per_epoch)
        jitted = jax.jit(step, donate_argnums=0)
        lowered = jitted.lower(job.initial_state(), job.batch(0))
    return dataclasses.replace(job, lowered=lowered)


def criterion(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    """Return the mean cross-entropy of a batch, and its accuracy as a metric."""
    loss = rjax.ops.softmax_cross_entropy(logits, labels).mean()
    hits = jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels
    return loss, {"accuracy": hits.astype(jnp.float32).mean()}


def _init(model: Any, data: rjax.data.Dataset, seed: int) -> Any:
    return _compiled_init(model, jax.random.key(seed), data.train[0][:1])


# Compiled once per model: one by one, the initializers take longer than the training.
@functools.partial(jax.jit, static_argnums=0)
def _compiled_init(model: Any, key: jax.Array, images: jax.Array) -> Any:
    return model.init(key, images)


def _plan(config: rjax.Config, variables: Any) -> rjax.Plan:
    stats = variables.get("batch_stats")
    return rjax.make_plan(variables["params"], config, batch_stats=stats)


@contextmanager
def _complaints_as_usage() -> Iterator[None]:
    """Turn rjax's `ValueError`s, which name the argument at fault, into usage errors.

    Only around validation: a `ValueError` out of a running step would be a bug.
    """
    try:
        yield
    except ValueError as error:
        raise UsageError(" ".join(str(error).split())) from error
