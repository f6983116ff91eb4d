"""What a step costs besides forward and backward, beside an Optax tree.

Nesterov in fp16 on the 161 leaves (25.6 M parameters) of ResNet-50, with a loss whose
gradient is the batch itself, so nearly all the time is loss scaling, check, norm,
update, EMA and casts. The peer does the same work on trees: Optax under `lax.cond`,
float32 masters, half-precision copy. Both are jitted with donated state and timed in
turn, one step each, in one process; every sample is kept.

    PYTHONPATH=. python benchmarks/update_step.py [--ema] [--steps 50] [--out FILE]
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rjax

LR, MOMENTUM, DECAY, EMA = 0.1, 0.9, 1e-4, 0.999


def resnet50_params():
    """Return arrays of the shapes of ResNet-50."""
    rng, params = np.random.default_rng(0), {}

    def conv(name, *shape):
        kernel = rng.standard_normal(shape, np.float32) * np.float32(0.01)
        params[name] = {"kernel": kernel}
        ones, zeros = np.ones(shape[-1], np.float32), np.zeros(shape[-1], np.float32)
        params[name + "_bn"] = {"scale": ones, "bias": zeros}

    conv("stem", 7, 7, 3, 64)
    width = 64
    for stage, (c, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            name = f"stage{stage}_block{block}_"
            conv(name + "a", 1, 1, width, c)
            conv(name + "b", 3, 3, c, c)
            conv(name + "c", 1, 1, c, 4 * c)
            if block == 0:
                conv(name + "skip", 1, 1, width, 4 * c)
            width = 4 * c
    head = rng.standard_normal((2048, 1000), np.float32) * np.float32(0.01)
    params["head"] = {"kernel": head, "bias": np.zeros(1000, np.float32)}
    return params


def narrow(tree):
    """Return the compute view of a tree: kernels in fp16, a copy of the rest."""
    return jax.tree.map(
        lambda x: x.astype(jnp.float16) if x.ndim > 1 else jnp.copy(x), tree
    )


def loss(params, batch):
    """Return the inner product with the batch; its gradient is the batch."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(batch), strict=True)
    return sum(jnp.sum((p * b).astype(jnp.float32)) for p, b in pairs)


def rjax_step(params, ema):
    """Return (step, state) of rjax."""
    config = rjax.Config(
        optimizer=rjax.optim.nesterov(MOMENTUM, DECAY),
        learning_rate=LR,
        ema=rjax.Ema(EMA) if ema else None,
    )
    plan = rjax.make_plan(params, config)
    step = rjax.make_train_step(rjax.stateless_loss(loss), plan)
    return step, rjax.init_state(plan, params)


def optax_step(params, ema):
    """Return (step, state) of the peer."""
    mask = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)  # noqa: E731
    tx = optax.chain(
        optax.add_decayed_weights(DECAY, mask),
        optax.sgd(LR, MOMENTUM, nesterov=True),
    )

    def step(state, batch):
        scale = state["scale"]
        value, grads = jax.value_and_grad(lambda h: loss(h, batch) * scale)(
            state["half"]
        )
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        norm = optax.global_norm(grads)
        finite = jnp.isfinite(norm)
        model = {k: v for k, v in state.items() if k != "scale"}

        def apply(model):
            updates, opt = tx.update(grads, model["opt"], model["params"])
            new = optax.apply_updates(model["params"], updates)
            out = {"params": new, "opt": opt, "half": narrow(new)}
            if ema:
                out["ema"] = jax.tree.map(
                    lambda e, w: EMA * e + (1 - EMA) * w, model["ema"], new
                )
                out["half_ema"] = narrow(out["ema"])
            return out

        model = jax.lax.cond(finite, apply, lambda m: m, model)
        model["scale"] = jnp.where(finite, scale, jnp.maximum(scale * 0.5, 1.0))
        return model, (value / scale, norm)

    params = jax.tree.map(jnp.array, params)
    state = {"params": params, "opt": tx.init(params), "half": narrow(params)}
    if ema:
        state["ema"] = jax.tree.map(jnp.copy, params)
        state["half_ema"] = narrow(params)
    return step, state | {"scale": jnp.float32(8192.0)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ema", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    params = resnet50_params()
    batch = jax.tree.map(
        lambda x: jnp.full(x.shape, 1e-4, jnp.float16 if x.ndim > 1 else jnp.float32),
        params,
    )
    programs, rows = {}, {}
    for name, make in (("rjax", rjax_step), ("optax tree", optax_step)):
        step, state = make(params, args.ema)
        start = time.perf_counter()
        program = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
        rows[name] = {
            "compile_s": time.perf_counter() - start,
            "temp_mb": program.memory_analysis().temp_size_in_bytes / 2**20,
            "ms": [],
        }
        programs[name] = [program, state]
    for i in range(args.steps + 3):
        for name, (program, state) in programs.items():
            start = time.perf_counter()
            state, out = program(state, batch)
            jax.block_until_ready((state, out))
            programs[name][1] = state
            if i >= 3:  # the first ones warm up
                rows[name]["ms"].append((time.perf_counter() - start) * 1e3)
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, fp16 Nesterov, ema={args.ema}")
    for name, row in rows.items():
        low, *_, high = sorted(row["ms"])
        print(
            f"{name:12s} median {statistics.median(row['ms']):8.3f} ms  min {low:8.3f}"
            f"  max {high:8.3f}  n={len(row['ms'])}  compile {row['compile_s']:5.1f} s"
            f"  temporaries {row['temp_mb']:.0f} MiB"
        )
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"device": device, "jax": jax.__version__, "rows": rows}, file)


if __name__ == "__main__":
    main()
