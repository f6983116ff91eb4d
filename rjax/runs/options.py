"""The options of `rjax plan` and `rjax train`, in the groups that `--help` shows.

A field's name is its flag. `None` means: not given; what then happens is said in the
field's text and done where the option is used.
"""

import dataclasses
from typing import Annotated, Any, Literal

import tyro

from rjax.runs.device_options import DeviceOptions


def _hint(default: str) -> str:
    """Return what the help says of a default: nothing of one that is `None`."""
    return "" if default == "None" else f"(default: {default})"


# Options that may be left out.
Number = Annotated[
    float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint=_hint)
]
Count = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint=_hint)]
Folder = Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint=_hint)]
_widths = tyro.conf.arg(metavar="INT ...", help_behavior_hint=_hint)
_epochs = tyro.conf.arg(metavar="FLOAT ...", help_behavior_hint=_hint)
_range = tyro.conf.arg(metavar="LOW HIGH", help_behavior_hint=_hint)
_run = tyro.conf.arg(metavar="RUN", help_behavior_hint=_hint)
_name = tyro.conf.arg(help_behavior_hint=_hint)


@dataclasses.dataclass(frozen=True)
class SourceOptions:
    """What to train on.

    Attributes:
        data: Data set; `digits` comes with scikit-learn, `images` is a folder
            of pictures sorted into one folder per class, the others are the
            files as published.
        data_dir: Folder with the files of the data set; only `digits` needs
            none.
        image_size: Side that pictures of `images` are resized and cropped to.
        normalize: Bring images to mean 0 and standard deviation 1 by the figures of
            this set; augmentation still fills with black.
    """

    data: Literal[
        "digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "images"
    ] = "digits"
    data_dir: Folder = None
    image_size: Count = None
    normalize: Annotated[Literal["mnist", "cifar10", "imagenet"] | None, _name] = None


@dataclasses.dataclass(frozen=True)
class NetworkOptions:
    """What to train.

    Attributes:
        model: Dense layers, three convolutions, or a residual network for small
            images.
        hidden: Widths of the hidden layers of `mlp`; 256 128 if not given.
        dropout: Share of hidden activations that `mlp` drops in training.
        width: Channels of the first block: 32 for `cnn`, 16 for `resnet` if not
            given.
        blocks: Blocks in each of the three stages of `resnet`; 3 (20 layers) if
            not given.
    """

    model: Literal["mlp", "cnn", "resnet"] = "mlp"
    hidden: Annotated[tuple[int, ...] | None, _widths] = None
    dropout: Number = None
    width: Count = None
    blocks: Count = None


@dataclasses.dataclass(frozen=True)
class NumericsOptions:
    """In which numbers; masters are always float32.

    Attributes:
        precision: Precision of the compute copy.
        scaling: Rule of the loss scale; `auto` is `halving` for fp16 and `off` else.
        loss_scale: First loss scale; 8192, or 65536 for `dynamic`, if not
            given.
        max_consecutive_skips: Skipped steps in a row at which the run gives up,
            with a diagnosis.
        implementation: What serves the operations over arenas: XLA, or the kernels
            for NVIDIA GPUs; the faster one where it was measured if not given.
    """

    precision: Literal["fp16", "bf16", "fp32"] = "fp16"
    scaling: Literal["auto", "halving", "static", "dynamic", "off"] = "auto"
    loss_scale: Number = None
    max_consecutive_skips: int = 50
    implementation: Annotated[Literal["xla", "mosaic_gpu"] | None, _name] = None


@dataclasses.dataclass(frozen=True)
class UpdateOptions:
    """How the masters move.

    Attributes:
        optimizer: Optimizer of the float32 masters.
        momentum: Momentum of `nesterov`, `momentum` and `lars`; 0.9 if not
            given.
        weight_decay: Weight decay; biases and norms never decay.
        clip_norm: Bound on the global norm of the true gradient.
        clip_value: Bound on every element of the true gradient.
        clip_on_inf: With --clip-value, an infinite gradient skips the step or is
            clamped to the bound.
        ema_decay: Decay of the moving average of the masters; 0 switches it
            off.
        ema_batch_stats: Batch statistics of the average: averaged too, or copied.
        accumulation_steps: Micro-batches that a batch is split into.
    """

    optimizer: Literal["nesterov", "momentum", "sgd", "adam", "adamw", "lars"] = (
        "nesterov"
    )
    momentum: Number = None
    weight_decay: float = 1e-4
    clip_norm: Number = None
    clip_value: Number = None
    clip_on_inf: Literal["skip", "clamp"] = "skip"
    ema_decay: float = 0.99
    ema_batch_stats: Literal["average", "copy"] = "average"
    accumulation_steps: int = 1


@dataclasses.dataclass(frozen=True)
class AugmentOptions:
    """What is changed in training images at random, in this order.

    Attributes:
        crop_pad: Pixels added on every side before a window of the old size is cut
            at a random place.
        flip: Mirror half of the images, left to right.
        rotate: Largest angle, in degrees, that images are turned by either way.
        zoom: Lowest and highest factor of their size, 1 leaves it.
        erase: Share of the images that lose a box of random shape and place.
        erase_area: Least and largest share of an image that the box of --erase covers;
            0.02 0.33 if not given.
    """

    crop_pad: Count = None
    flip: bool = False
    rotate: Number = None
    zoom: Annotated[tuple[float, float] | None, _range] = None
    erase: Number = None
    erase_area: Annotated[tuple[float, float] | None, _range] = None


@dataclasses.dataclass(frozen=True)
class RateOptions:
    """The learning rate over the applied steps; epochs may be fractions.

    Attributes:
        learning_rate: Learning rate, or the highest of a schedule; if not
            given, one that suits the optimizer.
        schedule: Course after the warm-up; `restarts` is cosine with warm
            restarts, `wsd` is warm-up, stable, decay. It spans all --epochs,
            whatever ends the run earlier.
        warmup_epochs: Epochs in which the rate rises linearly, for every
            schedule; 0 if not given, a twentieth of all for `wsd`.
        final_learning_rate: Rate at the end of `polynomial`, `cosine`, `wsd`
            and of each period of `restarts`; 0 if not given.
        decay_epochs: `step`: epochs between two drops, a third of all if not
            given. `exponential`: epochs in which the rate falls by one factor,
            1 if not given. `wsd`: epochs of the decay, a fifth of all if not
            given.
        decay_rate: Factor of `step` and `multistep`, 0.1 if not given, and of
            `exponential`, 0.95 if not given.
        milestones: Epochs, counted from the start of the run, at which
            `multistep` drops.
        power: Exponent of `polynomial`; 1 if not given.
        restart_epochs: Epochs of the first period of `restarts`; a third of all
            if not given.
        restart_multiplier: How much longer each period of `restarts` is than
            the last; 2 if not given.
    """

    learning_rate: Number = None
    schedule: Literal[
        "constant", "step", "multistep", "exponential", "polynomial", "cosine",
        "restarts", "wsd",
    ] = "cosine"  # fmt: skip
    warmup_epochs: Number = None
    final_learning_rate: Number = None
    decay_epochs: Number = None
    decay_rate: Number = None
    milestones: Annotated[tuple[float, ...] | None, _epochs] = None
    power: Number = None
    restart_epochs: Number = None
    restart_multiplier: Number = None


@dataclasses.dataclass(frozen=True)
class LoopOptions:
    """How long, and in which steps.

    Attributes:
        epochs: Passes over the training set.
        batch_size: Images per step; what does not fill a last batch is left
            out, other images in each epoch.
        label_smoothing: Share of each label spread evenly over all classes, in
            training.
        limit_steps: Stop after this many steps; the schedule stays that of all
            epochs.
        eval_every: Epochs between two evaluations; 0 evaluates at the end only.
        validation_fraction: Share of the training set held out for these
            evaluations; if not given, 0.1 with --early-stop and 0, which
            evaluates the test set, else.
        early_stop: Stop after this many evaluations in a row without a lower
            loss, and keep the weights of the best.
        seed: Seed of the weights, the order of the data, the augmentation and the
            dropout.
        whole_epochs: Keep the data on the device and train each epoch in one
            program, in an order of its own; lines, checks and records come an epoch
            later, and an interrupt waits for the epochs under way.
        deterministic: Make XLA choose the same kernels every time, so that two runs
            give the same bits on a GPU too; it may cost speed.
        compile_cache: Keep compiled programs in `~/.cache/rjax/xla`, where the next
            run with the same options finds them.
    """

    epochs: int = 20
    batch_size: int = 32
    label_smoothing: float = 0.0
    limit_steps: Count = None
    eval_every: int = 1
    validation_fraction: Number = None
    early_stop: Count = None
    seed: int = 0
    whole_epochs: bool = False
    deterministic: bool = False
    compile_cache: bool = True


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """What is left and said.

    Attributes:
        out: Folder of the run, new or empty; if not given, the next free one
            under `runs`.
        log_every: Steps between two lines of progress within an epoch; no step
            waits for them, and --whole-epochs has none.
        plan: Print the plan before training.
        tensorboard: Write TensorBoard events too, through tensorboardX or clu.
        record_every: Steps from one digest of the whole state to the next, by which
            `rjax compare` finds where two runs part; 0 records nothing. In whole
            epochs the nearest number that divides the steps of one.
        snapshot_every: Steps from one copy of the whole state on disk to the next,
            with which it shows single elements; 0 keeps none.
        checkpoint_every: Steps from one checkpoint in the run's folder to the next; in
            whole epochs, the end of the epoch. If not given, one at the end of every
            epoch, unless the last is still being written; 0 keeps none.
        keep_checkpoints: How many of the last checkpoints stay; the one with the lowest
            loss of an evaluation stays as well.
        weights: Format of the weights that the run leaves at its end.
        resume: Folder of a run to go on with, from its last checkpoint, with its
            options; those given here win.
        record_grads: Record digests of the gradients too, of the step after each
            digest of the state, so that a gradient is seen to differ before any
            weight does.
    """

    out: Folder = None
    log_every: int = 500
    plan: bool = True
    tensorboard: bool = False
    record_every: int = 10
    snapshot_every: int = 0
    checkpoint_every: Count = None
    keep_checkpoints: int = 3
    weights: Literal["npz", "safetensors", "none"] = "npz"
    resume: Annotated[str | None, _run] = None
    record_grads: bool = False


@dataclasses.dataclass(frozen=True)
class RecipeOptions:
    """Options that belong together, by one name.

    Attributes:
        recipe: Take what is not given from a recipe; with --help, all that it sets
            is shown. `mnist-mlp`: an MLP 784-1024-512-256-10 on MNIST, 100 epochs of
            augmented images, each in one program.
    """

    recipe: Annotated[Literal["mnist-mlp"] | None, _name] = None


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Print where a model's parameters lie, without training it."""

    source: SourceOptions = SourceOptions()
    network: NetworkOptions = NetworkOptions()
    numerics: NumericsOptions = NumericsOptions()
    update: UpdateOptions = UpdateOptions()


@dataclasses.dataclass(frozen=True)
class TrainOptions(PlanOptions):
    """Train a model; leave its manifest and a line of metrics per step in a folder."""

    augment: AugmentOptions = AugmentOptions()
    rate: RateOptions = RateOptions()
    loop: LoopOptions = LoopOptions()
    output: OutputOptions = OutputOptions()
    devices: DeviceOptions = DeviceOptions()
    recipe: RecipeOptions = RecipeOptions()


def flat(options: PlanOptions) -> dict[str, Any]:
    """Return every option by its name, without the groups."""
    groups = (getattr(options, field.name) for field in dataclasses.fields(options))
    return {name: value for group in groups for name, value in vars(group).items()}


def with_values(options: TrainOptions, **values: Any) -> TrainOptions:
    """Return options with others, by their names without the groups."""
    groups = {}
    for field in dataclasses.fields(options):
        group = getattr(options, field.name)
        own = {name: values[name] for name in vars(group).keys() & values.keys()}
        groups[field.name] = dataclasses.replace(group, **own)
    return dataclasses.replace(options, **groups)


def flag(name: str) -> str:
    """Return an option's name as it is typed."""
    return "--" + name.replace("_", "-")
