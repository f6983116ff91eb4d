"""The training in PyTorch: SGD, autocast and GradScaler as its documentation has them.

It also serves as the reference: the same in float64, and in float64 with the rounding
of float32 put in by hand.
"""

import numpy as np
import torch

from parity import problem
from parity.problem import BLOCKS, Course, Problem

F = torch.nn.functional


def train(
    given: Problem,
    dtype: torch.dtype,
    *,
    half: bool = False,
    rounding: int | None = None,
) -> Course:
    """Train and return what happened.

    Args:
        given: the training.
        dtype: of the weights.
        half: whether to compute in float16, by autocast, with a loss scale.
        rounding: seed of relative errors of float32's size that are put on every
            gradient and every weight; `None` for none.
    """
    torch.set_num_threads(1)  # pictures so small gain nothing from more
    model = _Model(given, dtype)
    optimizer = _optimizer(model)
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=problem.SCALE,
        growth_factor=problem.GROWTH,
        backoff_factor=problem.BACKOFF,
        growth_interval=problem.INTERVAL,
        enabled=half,
    )
    rng = None if rounding is None else np.random.default_rng(rounding)
    course = Course()
    images = torch.tensor(given.images.transpose(0, 1, 4, 2, 3)).to(dtype)
    labels = torch.tensor(given.labels, dtype=torch.int64)
    for step in range(given.steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=half):
            logits = model(images[step])
        loss = F.cross_entropy(logits if dtype == torch.float64 else logits.float(),
                               labels[step])  # fmt: skip
        scaler.scale(loss * float(given.boosts[step])).backward()
        if rng is not None:
            _put_rounding(model, rng, of_gradients=True)
        before, moved = scaler.get_scale(), model.flat()
        scaler.step(optimizer)
        scaler.update()
        if rng is not None:
            _put_rounding(model, rng, of_gradients=False)
        course.losses.append(loss.item())
        course.scales.append(before)
        course.weights.append(model.flat())
        # A skipped step lowers the scale, and nothing else does.
        course.applied.append(not half or scaler.get_scale() >= before)
        assert course.applied[-1] or (moved == course.weights[-1]).all()
    course.stats, course.closest = model.stats(), model.closest
    return course


class _Model(torch.nn.Module):
    """`rjax.nn.CNN` in PyTorch."""

    def __init__(self, given: Problem, dtype: torch.dtype) -> None:
        super().__init__()
        self.closest = float("inf")
        self.named: dict[str, torch.nn.Parameter] = {}
        self.norms: list[torch.nn.BatchNorm2d] = []
        self.convs: list[torch.nn.Conv2d] = []
        for i, (inputs, outputs, stride) in enumerate(BLOCKS, start=1):
            conv = torch.nn.Conv2d(inputs, outputs, 3, stride, bias=False)
            norm = torch.nn.BatchNorm2d(outputs)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"norm{i}", norm)
            self.convs.append(conv)
            self.norms.append(norm)
            self.named[f"block{i}/conv/kernel"] = conv.weight
            self.named[f"block{i}/bn/scale"] = norm.weight
            self.named[f"block{i}/bn/bias"] = norm.bias
        self.head = torch.nn.Linear(BLOCKS[-1][1], problem.CLASSES)
        self.named["head/kernel"] = self.head.weight
        self.named["head/bias"] = self.head.bias
        self.to(dtype)
        with torch.no_grad():
            for name, weight in self.named.items():
                found = np.ascontiguousarray(_theirs(given.weights[name]))
                weight.copy_(torch.tensor(found))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm, (_, _, stride) in zip(
            self.convs, self.norms, BLOCKS, strict=True
        ):
            # As "SAME" pads in JAX: what is odd goes to the far side.
            x = F.pad(x, (0, 1, 0, 1) if stride == 2 else (1, 1, 1, 1))
            x = norm(conv(x))
            self.closest = min(self.closest, float(x.detach().abs().min()))
            x = F.relu(x)
        return self.head(x.mean((2, 3)))

    def flat(self) -> np.ndarray:
        """Return all weights in JAX's layout."""
        arrays = {n: _ours(w.detach().numpy()) for n, w in self.named.items()}
        return problem.flat(arrays)

    def stats(self) -> dict[str, np.ndarray]:
        """Return the running statistics."""
        return {
            f"block{i}/bn/{name}": getattr(norm, f"running_{name}").double().numpy()
            for i, norm in enumerate(self.norms, start=1)
            for name in ("mean", "var")
        }


def _optimizer(model: _Model) -> torch.optim.Optimizer:
    groups = [
        {
            "params": [
                w for n, w in model.named.items() if problem.decays(n) is decays
            ],
            "weight_decay": problem.DECAY if decays else 0.0,
        }
        for decays in (True, False)
    ]
    return torch.optim.SGD(
        groups, lr=problem.RATE, momentum=problem.MOMENTUM, nesterov=True
    )


def _put_rounding(
    model: _Model, rng: np.random.Generator, *, of_gradients: bool
) -> None:
    """Put errors of float32's size on gradients or weights.

    A weight is rounded to float32. A gradient is a sum of many products: its errors are
    taken as those of a sum of sqrt(terms) roundings, of the size of the whole tensor.
    """
    with torch.no_grad():
        for weight in model.named.values():
            if not of_gradients:
                weight.copy_(weight.float().double())
                continue
            grad = weight.grad
            assert grad is not None
            terms = problem.BATCH * 64
            size = 2.0**-24 * terms**0.5 * grad.square().mean().sqrt()
            noise = torch.tensor(rng.uniform(-1, 1, tuple(grad.shape)))
            grad += size * noise


def _theirs(array: np.ndarray) -> np.ndarray:
    """Return a kernel HWIO as OIHW, or one IO as OI; all else as it is."""
    return array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T


def _ours(array: np.ndarray) -> np.ndarray:
    return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
