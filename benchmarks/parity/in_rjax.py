"""The training in rjax: coupled decay, a dynamic rule with GradScaler's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

import rjax
from parity import problem
from parity.problem import Course, Problem


def train(given: Problem, precision: str, decay: str = "coupled") -> Course:
    """Train and return what happened.

    Args:
        given: the training.
        precision: "fp32" or "fp16", which has a loss scale.
        decay: "coupled" as in PyTorch, or "decoupled" to see that it is told apart.
    """
    model = rjax.nn.CNN(problem.CLASSES, width=problem.WIDTH)
    variables = jax.eval_shape(model.init, jax.random.key(0), given.images[0])
    stats = {
        path: jnp.full(leaf.shape, float(path[-1] == "var"), jnp.float32)
        for path, leaf in traverse_util.flatten_dict(variables["batch_stats"]).items()
    }
    stats = traverse_util.unflatten_dict(stats)
    weights = {name: jnp.asarray(array) for name, array in given.weights.items()}
    params = traverse_util.unflatten_dict(weights, sep="/")
    plan = rjax.make_plan(params, _config(precision, decay), batch_stats=stats)
    state = rjax.init_state(plan, params, batch_stats=stats)
    loss_fn = rjax.linen_loss(model, _criterion)
    step = jax.jit(rjax.make_train_step(loss_fn, plan), donate_argnums=0)
    course = Course()
    for images, labels, boost in zip(
        given.images, given.labels, given.boosts, strict=True
    ):
        targets = jnp.asarray(labels), jnp.asarray(boost)
        state, report = step(state, (jnp.asarray(images), targets))
        course.losses.append(float(report.metrics["loss"]))
        course.scales.append(float(report.scale))
        course.applied.append(bool(report.applied))
        found = traverse_util.flatten_dict(rjax.get_params(plan, state), sep="/")
        ordered = {name: np.asarray(found[name]) for name in given.weights}
        course.weights.append(problem.flat(ordered))
    left = rjax.get_batch_stats(plan, state)
    course.stats = {
        "/".join(path): np.asarray(leaf, np.float64)
        for path, leaf in traverse_util.flatten_dict(left).items()
    }
    return course


def _config(precision: str, decay: str) -> rjax.Config:
    optimizer = rjax.optim.nesterov(problem.MOMENTUM, problem.DECAY, decay=decay)
    scaling = None
    if precision == "fp16":
        scaling = rjax.scaling.dynamic(
            problem.SCALE, problem.GROWTH, problem.BACKOFF, problem.INTERVAL
        )
    return rjax.Config(
        precision, scaling=scaling, optimizer=optimizer, learning_rate=problem.RATE
    )


def _criterion(
    logits: jax.Array, targets: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    labels, boost = targets
    loss = rjax.ops.softmax_cross_entropy(logits, labels).mean()
    return loss * boost, {"loss": loss}
