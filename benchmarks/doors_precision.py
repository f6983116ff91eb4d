"""Last losses in fp32, bf16 and fp16 of networks of three libraries, by one train step.

    PYTHONPATH=. python benchmarks/doors_precision.py [--steps 400] [--seeds 3]

A residual network of stock Flax Linen layers, one of Flax NNX and a transformer with
tied weights, on digits and on the Zen of Python; with SGD, AdamW and an Optax chain.
Prints, for each, the mean of the last 20 losses of every seed in fp32, and how far the
others end from it.
"""

import argparse
import functools
import statistics

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import rjax

LAST = 20


class LinenBlock(nn.Module):
    width: int
    dtype: object

    @nn.compact
    def __call__(self, x, train):
        conv = functools.partial(
            nn.Conv, self.width, (3, 3), use_bias=False, dtype=self.dtype
        )
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype
        )
        y = norm()(conv()(nn.relu(norm()(conv()(x)))))
        return nn.relu(x + y)


class LinenResNet(nn.Module):
    dtype: object
    width: int = 16
    blocks: int = 2

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Conv(self.width, (3, 3), dtype=self.dtype)(x))
        for _ in range(self.blocks):
            x = LinenBlock(self.width, self.dtype)(x, train)
        return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2)))


class NnxBlock(nnx.Module):
    def __init__(self, width, dtype, rngs):
        conv = functools.partial(
            nnx.Conv, width, width, (3, 3), use_bias=False, dtype=dtype, rngs=rngs
        )
        norm = functools.partial(
            nnx.BatchNorm, width, momentum=0.9, dtype=dtype, rngs=rngs
        )
        self.conv1, self.conv2, self.norm1, self.norm2 = conv(), conv(), norm(), norm()

    def __call__(self, x):
        y = self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x)))))
        return nnx.relu(x + y)


class NnxResNet(nnx.Module):
    def __init__(self, dtype, rngs, width=16, blocks=2):
        self.stem = nnx.Conv(1, width, (3, 3), dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(width, dtype, rngs) for _ in range(blocks)])
        self.head = nnx.Linear(width, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def door(network, precision, seed):
    """Return parameters, statistics, loss function and examples."""
    dtype, key = rjax.Policy(precision).compute_dtype, jax.random.key(seed)
    criterion = rjax.ops.softmax_cross_entropy
    if network == "transformer":
        zen = rjax.data.load_text(length=32)
        model = rjax.nn.Transformer(zen.num_classes, features=64, layers=2)
        params = model.init(key, zen.train[0][:1])["params"]
        loss_fn = rjax.linen_loss(model, rjax.nn.masked_cross_entropy)
        return params, {}, loss_fn, zen.train
    digits = rjax.data.load_digits().train
    if network == "nnx":
        module = NnxResNet(dtype, nnx.Rngs(seed))
        return *rjax.nnx_variables(module), rjax.nnx_loss(module, criterion), digits
    module = LinenResNet(dtype)
    variables = module.init(key, jnp.ones((1, 8, 8, 1)))
    loss_fn = rjax.linen_loss(module, criterion)
    return variables["params"], variables["batch_stats"], loss_fn, digits


def configured(optimizer, network, precision, steps):
    """Return the configuration of a run."""
    if optimizer == "sgd":
        rule, rate = rjax.optim.sgd(), 0.1
    elif optimizer == "adamw":
        rule, rate = rjax.optim.adamw(weight_decay=1e-2), 1e-3
    else:
        schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, steps // 10, steps)
        chain = optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(schedule))
        rule, rate = rjax.optim.from_optax(chain), None
    return rjax.Config(precision=precision, optimizer=rule, learning_rate=rate)


def end(network, optimizer, precision, seed, steps):
    """Train once; return the mean of the last losses, and the skips."""
    params, stats, loss_fn, examples = door(network, precision, seed)
    config = configured(optimizer, network, precision, steps)
    plan = rjax.make_plan(params, config, stats)
    state = rjax.init_state(plan, params, stats, seed)
    step = jax.jit(rjax.make_train_step(loss_fn, plan), donate_argnums=0)
    losses = []
    for batch in rjax.data.train_batches(examples, 64, seed=seed, stop=steps):
        state, report = step(state, batch)
        losses.append(report.loss)
    last = jax.device_get(losses[-LAST:])
    return statistics.fmean(map(float, last)), int(state.skipped)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.steps} steps")
    for network in ("linen", "nnx", "transformer"):
        for optimizer in ("sgd", "adamw", "optax"):
            run = functools.partial(end, network, optimizer, steps=args.steps)
            wide = [run("fp32", seed)[0] for seed in range(args.seeds)]
            each = "  ".join(f"{loss:.4f}" for loss in wide)
            print(f"{network:12s} {optimizer:6s} fp32  {each}", flush=True)
            for precision in ("bf16", "fp16"):
                found = [run(precision, seed) for seed in range(args.seeds)]
                apart = [
                    f"{loss - w:+.4f} ({100 * (loss - w) / w:+.2f} %)"
                    for (loss, _), w in zip(found, wide, strict=True)
                ]
                skips = [skipped for _, skipped in found]
                print(f"{'':20s}{precision}  {'  '.join(apart)}  skipped {skips}")


if __name__ == "__main__":
    main()
