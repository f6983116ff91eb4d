"""PyTorch: the same recipe, all of it on the GPU.

On a GPU a whole step, from the rows of the batch to the next loss scale, is one CUDA
graph that is replayed: captured by hand, with the batch, augmentation, forward and
backward pass compiled ("torch") or eager ("torch-eager"). "torch-reduce-overhead"
leaves graphs to `torch.compile`. On a CPU, where there are none, all of them are eager.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import rjax
from mnist.settings import RECIPE, Settings
from rjax.runs.normalization import Normalization

SCALE = 8192.0
# Of `RandomErasing`, in rjax and in torchvision.
TRIES, AREA, ASPECT = 10, RECIPE["erase_area"], (0.3, 3.3)
NORMALIZATION = Normalization.preset(RECIPE["normalize"])


class MLP(nn.Module):
    """Dense layers with ReLU between them, of normalized images, drawn as rjax does."""

    def __init__(self, inputs: int, hidden: tuple[int, ...], classes: int):
        super().__init__()
        widths = (inputs, *hidden, classes)
        self.layers = nn.ModuleList(
            nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)
        )
        self.draw()

    def draw(self) -> None:
        """Draw kernels anew; biases are zero."""
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (factor,), (offset,) = NORMALIZATION.factor, NORMALIZATION.offset
        x = x.flatten(1) * factor + offset
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


def augment(images: torch.Tensor) -> torch.Tensor:
    """Crop, turn, zoom and erase images [n, 1, height, width], each its own way."""
    n, _, height, width = images.shape
    images = crop(images, RECIPE["crop_pad"])
    low, high = RECIPE["zoom"]
    u = torch.rand(n, 2, device=images.device)
    angle = (2 * u[:, 0] - 1) * math.radians(RECIPE["rotate"])
    zoom = low + u[:, 1] * (high - low)
    cosine, sine = torch.cos(angle) / zoom, torch.sin(angle) / zoom
    zero = torch.zeros_like(cosine)
    rows = [cosine, -sine * height / width, zero, sine * width / height, cosine, zero]
    theta = torch.stack(rows, dim=1).view(n, 2, 3)
    grid = F.affine_grid(theta, [n, 1, height, width], align_corners=False)
    images = F.grid_sample(images, grid, align_corners=False)
    return erase(images, RECIPE["erase"])


def crop(images: torch.Tensor, pad: int) -> torch.Tensor:
    """Cut a window of the old size out of each padded image, at a random place."""
    n, _, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    places = torch.randint(2 * pad + 1, (n, 2), device=images.device)
    down = places[:, :1] + torch.arange(height, device=images.device)
    right = places[:, 1:] + torch.arange(width, device=images.device)
    batch = torch.arange(n, device=images.device)
    found = padded[batch[:, None, None], 0, down[:, :, None], right[:, None, :]]
    return found[:, None]


def erase(images: torch.Tensor, probability: float) -> torch.Tensor:
    """Set a random box of some images to 0: the first of ten that fits."""
    n, _, height, width = images.shape
    u = torch.rand(n, 2 * TRIES + 3, device=images.device)
    areas = AREA[0] + u[:, :TRIES] * (AREA[1] - AREA[0])
    logs = math.log(ASPECT[0]), math.log(ASPECT[1])
    ratios = torch.exp(logs[0] + u[:, TRIES : 2 * TRIES] * (logs[1] - logs[0]))
    pixels = areas * height * width
    tall, wide = (
        torch.sqrt(pixels / ratios).round(),
        torch.sqrt(pixels * ratios).round(),
    )
    fit = (tall >= 1) & (wide >= 1) & (tall <= height) & (wide <= width)
    first = fit.int().argmax(1, keepdim=True)
    tall, wide = tall.gather(1, first), wide.gather(1, first)
    top = (u[:, -3:-2] * (height - tall + 1)).floor()
    left = (u[:, -2:-1] * (width - wide + 1)).floor()
    chosen = fit.any(1, keepdim=True) & (u[:, -1:] < probability)
    down = torch.arange(height, device=images.device)
    right = torch.arange(width, device=images.device)
    rows = (down >= top) & (down < top + tall) & chosen
    columns = (right >= left) & (right < left + wide)
    inside = rows[:, None, :, None] & columns[:, None, None, :]
    return torch.where(inside, torch.zeros((), device=images.device), images)


def rates(steps: int, epochs: int, warmup: float) -> torch.Tensor:
    """Return the rate of every step: a linear warm-up, then a cosine."""
    peak, final = RECIPE["learning_rate"], RECIPE["final_learning_rate"]
    total, warm = steps * epochs, round(warmup * steps)
    at = torch.arange(total, dtype=torch.float64)
    ramp = peak * (at + 1) / (warm + 1)
    share = (at - warm) / (total - warm)
    fall = final + (peak - final) * 0.5 * (1 + torch.cos(math.pi * share))
    return torch.where(at < warm, ramp, fall).float()


def _count(
    rates: torch.Tensor,
    step: torch.Tensor,
    rate: torch.Tensor,
    total: torch.Tensor,
    loss: torch.Tensor,
) -> None:
    """Take the rate of a step, add up its loss, and count it."""
    rate.copy_(rates.index_select(0, step)[0])
    total += loss
    step += 1


class Rig:
    """Model, optimizer, scaler and data, with all that moves in tensors of its own.

    Args:
        settings: of the runs.
    """

    def __init__(self, settings: Settings):
        torch.set_float32_matmul_precision("high")  # TF32, as JAX has it
        self._name, self._settings = settings.contender, settings
        self._cuda = torch.cuda.is_available()
        self._device = "cuda" if self._cuda else "cpu"
        data = rjax.data.load_mnist(settings.data_dir)
        self._images, self._labels = self._put(data.train)
        self._test = self._put(data.test)
        self._steps = len(self._labels) // settings.batch
        self.model = MLP(self._images[0].numel(), settings.hidden, data.num_classes).to(
            self._device
        )
        table = rates(self._steps, settings.epochs, settings.warmup_epochs)
        self._rates = table.to(self._device)
        self._order = torch.zeros(
            self._steps, settings.batch, dtype=torch.long, device=self._device
        )
        # Of one element: indexing by a scalar would ask the host.
        self._step = torch.zeros(1, dtype=torch.long, device=self._device)
        self._sum = torch.zeros((), device=self._device)
        self._make_optimizer()
        self._loss, self._count, self._replay = self._forward, _count, None
        if self._cuda and self._name != "torch-eager":
            graphs = self._name == "torch-reduce-overhead"
            mode = "reduce-overhead" if graphs else "default"
            self._loss = torch.compile(self._forward, mode=mode)
            self._count = torch.compile(_count)
            for x in (self._images, self._labels, self._order, self._step):
                # Else a graph of its own would copy them at each step.
                torch._dynamo.mark_static_address(x)

    def _put(self, side: Any) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = (torch.from_numpy(x).to(self._device) for x in side)
        return images.permute(0, 3, 1, 2).contiguous(), labels.long()

    def _make_optimizer(self) -> None:
        """Decay on kernels only; rate, moments and scale stay on the device."""
        layers = self.model.layers
        groups = [
            {
                "params": [layer.weight for layer in layers],
                "weight_decay": RECIPE["weight_decay"],
            },
            {"params": [layer.bias for layer in layers], "weight_decay": 0.0},
        ]
        on_gpu = {"fused": True, "capturable": True} if self._cuda else {}
        self._rate = torch.zeros((), device=self._device)
        rate = self._rate if self._cuda else 0.0
        self._optimizer = torch.optim.AdamW(groups, lr=rate, **on_gpu)
        self._scaler = torch.amp.GradScaler(self._device, SCALE, enabled=self._cuda)

    def _forward(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        order: torch.Tensor,
        step: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss of the batch of a step."""
        rows = order.index_select(0, step % len(order))[0]
        half = torch.float16 if self._cuda else torch.bfloat16
        with torch.autocast(self._device, half):
            logits = self.model(augment(images[rows]))
        smoothing = RECIPE["label_smoothing"]
        return F.cross_entropy(logits.float(), labels[rows], label_smoothing=smoothing)

    def _one(self) -> None:
        """Take one step; on a GPU nothing here asks the host."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self._images, self._labels, self._order, self._step)
        self._scaler.scale(loss).backward()
        self._count(self._rates, self._step, self._rate, self._sum, loss.detach())
        if not self._cuda:
            for group in self._optimizer.param_groups:
                group["lr"] = float(self._rate)
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def compile(self) -> None:
        self.reset(0)
        if not self._cuda:
            self.read(self.epoch())
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                self._one()
        torch.cuda.current_stream().wait_stream(side)
        if self._name != "torch-reduce-overhead":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._one()
            self._replay = graph.replay
        self.reset(0)
        self.read(self.epoch())

    def reset(self, seed: int) -> None:
        """Start anew in the same tensors, which a graph has by their addresses."""
        torch.manual_seed(seed)
        with torch.no_grad():
            self.model.draw()
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()
        if self._scaler.is_enabled() and self._scaler._scale is not None:
            self._scaler._scale.fill_(SCALE)
            self._scaler._growth_tracker.zero_()
        self._step.zero_()
        if self._cuda:
            torch.cuda.synchronize()

    def epoch(self) -> Any:
        count = self._order.numel()
        order = torch.randperm(len(self._labels), device=self._device)[:count]
        self._order.copy_(order.view_as(self._order))
        self._sum.zero_()
        one = self._replay or self._one
        for _ in range(self._steps):
            one()
        found = torch.stack([self._sum / self._steps, *self._seen()])
        if not self._cuda:
            return found, None
        host = torch.empty(3, pin_memory=True)
        host.copy_(found, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event

    @torch.no_grad()
    def _seen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return loss and accuracy of the whole test set, in float32 (TF32)."""
        images, labels = self._test
        logits = self.model(images)
        hits = (logits.argmax(1) == labels).float().mean()
        return F.cross_entropy(logits, labels), hits

    def read(self, begun: Any) -> tuple[float, float, float]:
        found, event = begun
        if event is not None:
            event.synchronize()
        loss, test_loss, accuracy = found.tolist()
        return loss, test_loss, accuracy

    def ending(self) -> dict[str, Any]:
        # PyTorch counts no skipped steps, but its moments count those applied.
        counts = {int(s["step"]) for s in self._optimizer.state.values()}
        skipped = int(self._step) - max(counts)
        return {"skipped": skipped, "scale": self._scaler.get_scale()}

    def facts(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name() if self._cuda else "cpu"
        versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
        return {"steps": self._steps, "device": name, "versions": versions}
