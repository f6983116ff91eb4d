"""Whether fp16 learns what float32 learns: one task, one stream of batches."""

import statistics
from typing import Any

import jax
import jax.numpy as jnp
import optax

import rjax
from throughput import on_jax
from throughput.settings import Settings

# Classes that have images, however many logits there are, and cells of their patterns.
CLASSES, CELLS = 10, 8
# Batches of the evaluation.
EVALUATIONS = 4


def draw(settings: Settings, patterns: jax.Array, key: jax.Array) -> Any:
    """Return images, each the pattern of its class plus as much noise, and labels."""
    for_labels, for_noise = jax.random.split(key)
    n, size = settings.batch, settings.image
    labels = jax.random.randint(for_labels, (n,), 0, len(patterns), jnp.int32)
    cells = jnp.arange(size) * CELLS // size
    images = patterns[labels][:, cells][:, :, cells]
    images = images + jax.random.normal(for_noise, images.shape, images.dtype)
    return images.astype(on_jax.DTYPES[settings.precision]), labels


def patterns(settings: Settings) -> jax.Array:
    """Return a coarse picture of every class: f32[classes, cells, cells, 3]."""
    shape = (min(CLASSES, settings.classes), CELLS, CELLS, 3)
    return jax.random.normal(jax.random.key(settings.seed + 1), shape, jnp.float32)


def schedule(settings: Settings) -> optax.Schedule:
    """Return a warm-up over a tenth of the steps, then a cosine down to nothing."""
    peak, steps = settings.learning_rate, settings.learn
    warm = max(1, steps // 10)
    return optax.warmup_cosine_decay_schedule(peak / warm, peak, warm, max(steps, 2))


def train(settings: Settings) -> dict[str, Any]:
    """Train rjax; return every loss, the steps that were skipped and an evaluation."""
    model, plan, step, state = on_jax.pipeline(settings, schedule(settings))
    pictures = patterns(settings)
    batch_of = jax.jit(lambda key, i: draw(settings, pictures, _fold(key, i)))
    program = jax.jit(step, donate_argnums=0)
    key, found = jax.random.key(settings.seed + 2), []
    for i in range(settings.learn):
        state, report = program(state, batch_of(key, i))
        found.append((report.loss, report.applied))
    evaluate = jax.jit(rjax.make_eval_step(_metrics(model), plan))
    fresh = jax.random.key(settings.seed + 3)
    rows = [evaluate(state, batch_of(fresh, i)) for i in range(EVALUATIONS)]
    host, rows = jax.device_get((found, rows))
    return {
        "losses": [float(loss) for loss, _ in host],
        "skipped_steps": [i for i, (_, applied) in enumerate(host) if not applied],
        "scale": float(state.scale),
        "eval_loss": statistics.fmean(float(loss) for loss, _ in rows),
        "eval_accuracy": statistics.fmean(float(hits) for _, hits in rows),
        **on_jax.environment(),
    }


def _fold(key: jax.Array, i: Any) -> jax.Array:
    return jax.random.fold_in(key, i)


def _metrics(model: Any) -> Any:
    def metrics(params: Any, batch_stats: Any, batch: Any) -> Any:
        images, labels = batch
        variables = {"params": params, "batch_stats": batch_stats}
        logits = model.apply(variables, images, train=False)
        hits = (logits.argmax(-1) == labels).astype(jnp.float32)
        return on_jax.criterion(logits, labels).mean(), hits.mean()

    return metrics
