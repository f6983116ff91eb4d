"""PyTorch: automatic mixed precision, channels last, eager or compiled.

The models are torchvision's, written out, by its names, but for the biases of VGG's
convolutions, which the norm behind them cancels and rjax does not have.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from throughput.settings import (
    EMA,
    MOMENTUM,
    SCALE,
    SMOOTHING,
    WEIGHT_DECAY,
    Settings,
    make_batch,
)

MODES = {
    "torch": None, "torch-compile": "default", "torch-compile-max": "max-autotune"
}  # fmt: skip
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


class Bottleneck(nn.Module):
    """1x1, 3x3 with the stride (v1.5), 1x1."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(inputs, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class BasicBlock(nn.Module):
    """3x3 with the stride, 3x3."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(inputs, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


def _downsample(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """ResNet-50 v1.5, or ResNet-20 with basic blocks."""

    def __init__(
        self,
        classes: int,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        block: Any = Bottleneck,
    ):
        super().__init__()
        large, inputs = block is Bottleneck, width
        self.conv1 = _conv(3, width, 7, 2) if large else _conv(3, width, 3)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        for stage, depth in enumerate(blocks):
            n, layers = width * 2**stage, []
            for i in range(depth):
                layers.append(block(inputs, n, 2 if stage > 0 and i == 0 else 1))
                inputs = n * block.expansion
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.stages = len(blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)
        _kaiming(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(self.stages):
            x = getattr(self, f"layer{stage + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class VGG16BN(nn.Module):
    """VGG-16 with batch norm."""

    def __init__(self, classes: int, width: int = 64, hidden: int = 4096):
        super().__init__()
        layers, inputs = [], 3
        for depth, widening in STAGES:
            for _ in range(depth):
                n = widening * width
                layers += [
                    _conv(inputs, n, 3),
                    nn.BatchNorm2d(n),
                    nn.ReLU(inplace=True),
                ]
                inputs = n
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            *(nn.Linear(inputs * 49, hidden), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(0.5)),
            nn.Linear(hidden, classes),
        )
        _kaiming(self)
        for module in self.classifier:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def _kaiming(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def make_model(settings: Settings) -> nn.Module:
    """Return the model of that name, as large as rjax's."""
    if settings.model == "vgg16bn":
        return VGG16BN(settings.classes)
    if settings.model == "resnet50":
        return ResNet(settings.classes)
    return ResNet(settings.classes, (3, 3, 3), 16, BasicBlock)


class TorchRig:
    """A model, an optimizer and a scaler, with the batch on the device.

    Args:
        name: one of `MODES`.
        settings: of the measurement.
    """

    def __init__(self, name: str, settings: Settings):
        torch.manual_seed(settings.seed)
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")  # TF32, as JAX has it
        self.cuda = torch.cuda.is_available()
        self.device = "cuda" if self.cuda else "cpu"
        self.dtype = DTYPES.get(settings.precision)
        self.model = make_model(settings).train()
        self.model.to(self.device).to(memory_format=torch.channels_last)
        mode = MODES[name]
        self.net = self.model if mode is None else torch.compile(self.model, mode=mode)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=SMOOTHING)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=settings.learning_rate,
            momentum=MOMENTUM,
            weight_decay=WEIGHT_DECAY,
            nesterov=True,
            fused=True,
        )
        scaled = settings.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.device, SCALE, enabled=scaled)
        self.average = _average(self.model) if settings.ema else None
        self.images, self.labels = self._batch(settings)

    def _batch(self, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch on the device; NHWC memory is PyTorch's channels_last."""
        images, labels = make_batch(settings)
        x = torch.from_numpy(images).to(self.device, self.dtype or torch.float32)
        x = x.permute(0, 3, 1, 2)
        assert x.is_contiguous(memory_format=torch.channels_last)
        return x, torch.from_numpy(labels).long().to(self.device)

    def compile(self) -> None:
        """Do nothing: `torch.compile` compiles in the first step."""

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        half = contextlib.nullcontext()
        if self.dtype is not None:
            half = torch.autocast(self.device, self.dtype)
        with half:
            loss = self.criterion(self.net(self.images), self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average is not None:
            self.average.update_parameters(self.model)
        return loss.detach()

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        found = {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "scale": self.scaler.get_scale(),
            "peak_bytes": None,
            "device": "cpu",
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        }
        if self.cuda:
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
            found["reserved_bytes"] = torch.cuda.max_memory_reserved()
            found["device"] = torch.cuda.get_device_name()
            found["versions"]["cudnn"] = torch.backends.cudnn.version()
        return found


def _average(model: nn.Module) -> Any:
    from torch.optim import swa_utils

    how = swa_utils.get_ema_multi_avg_fn(EMA)
    return swa_utils.AveragedModel(model, multi_avg_fn=how, use_buffers=True)
