"""What options stand for, piece by piece: configuration, model, data, evaluation."""

import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("tyro")

import tyro
from run_helpers import SHORT, read_lines, read_manifest

import rjax
from rjax.cli import main
from rjax.repro import waiting
from rjax.repro.waiting import Waiting
from rjax.runs import build
from rjax.runs.evaluate import Evaluator, all_views
from rjax.runs.options import TrainOptions
from rjax.runs.setup import make_criterion, prepare_job

pytestmark = pytest.mark.standard_promotion


def parse(words: str) -> TrainOptions:
    return tyro.cli(
        TrainOptions, args=words.split(), config=(tyro.conf.OmitArgPrefixes,)
    )


CONFIGS: dict[str, dict[str, Any]] = {
    "": {},
    "--precision bf16": {"precision": "bf16"},
    "--loss-scale 64": {"scaling": rjax.scaling.halving(init=64.0)},
    "--scaling halving --loss-scale 2": {"scaling": rjax.scaling.halving(init=2.0)},
    "--scaling static": {"scaling": rjax.scaling.static(8192.0)},
    "--scaling static --loss-scale 16": {"scaling": rjax.scaling.static(16.0)},
    "--scaling dynamic": {"scaling": rjax.scaling.dynamic()},
    "--scaling dynamic --loss-scale 4": {"scaling": rjax.scaling.dynamic(init=4.0)},
    "--scaling off": {"scaling": rjax.scaling.off()},
    "--momentum 0.5": {"optimizer": rjax.optim.nesterov(0.5, weight_decay=1e-4)},
    "--optimizer momentum": {"optimizer": rjax.optim.momentum(weight_decay=1e-4)},
    "--optimizer sgd --weight-decay 0": {"optimizer": rjax.optim.sgd()},
    "--optimizer adamw --weight-decay 0.1": {
        "optimizer": rjax.optim.adamw(weight_decay=0.1)
    },
    "--optimizer lars --momentum 0.7": {
        "optimizer": rjax.optim.lars(momentum=0.7, weight_decay=1e-4)
    },
    "--clip-norm 2": {"clip": rjax.Clip(norm=2.0)},
    "--clip-value 2": {"clip": rjax.Clip(value=2.0)},
    "--clip-value 2 --clip-on-inf clamp": {
        "clip": rjax.Clip(value=2.0, on_inf="clamp")
    },
    "--ema-decay 0": {"ema": None},
    "--ema-decay 0.5 --ema-batch-stats copy": {
        "ema": rjax.Ema(decay=0.5, batch_stats="copy")
    },
    "--accumulation-steps 4": {"accumulation_steps": 4},
}


@pytest.mark.parametrize("words", CONFIGS)
def test_options_make_a_config(words: str) -> None:
    expected: dict[str, Any] = {
        "precision": "fp16",
        "optimizer": rjax.optim.nesterov(weight_decay=1e-4),
        "learning_rate": 0.5,
        "ema": rjax.Ema(decay=0.99),
    } | CONFIGS[words]
    assert build.build_config(parse(words), 0.5) == rjax.Config(**expected)


MODELS = {
    "": rjax.nn.MLP((256, 128), 7),
    "--hidden 5 4 --dropout 0.25": rjax.nn.MLP((5, 4), 7, dropout=0.25),
    "--model cnn": rjax.nn.CNN(7),
    "--model cnn --width 3": rjax.nn.CNN(7, width=3),
    "--model resnet": rjax.nn.ResNet(7),
    "--model resnet --width 8 --blocks 2": rjax.nn.ResNet(7, blocks=2, width=8),
}


@pytest.mark.parametrize("words", MODELS)
def test_options_make_a_model(words: str) -> None:
    assert build.build_model(parse(words).network, 7) == MODELS[words]


def test_every_optimizer_has_a_rate_of_its_own() -> None:
    for name, rate in build.LEARNING_RATES.items():
        options = parse(f"--optimizer {name}").update
        assert build.base_rate(options, None) == rate
        assert build.base_rate(options, 0.3) == 0.3


def test_label_smoothing_reaches_the_criterion() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
    labels = jnp.arange(6, dtype=jnp.int32) % 4
    loss, metrics = make_criterion(0.2)(logits, labels)
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 4), 0.2)
    expected = optax.softmax_cross_entropy(logits, smooth).mean()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    hits = np.mean(np.argmax(logits, -1) == np.asarray(labels))
    assert float(metrics["accuracy"]) == pytest.approx(hits)


@pytest.fixture(scope="module")
def job() -> Any:
    words = "--validation-fraction 0.25 --seed 3 --hidden 8 --ema-decay 0.5"
    return prepare_job(parse(words))


def test_what_is_held_out_is_never_trained_on(job: Any) -> None:
    assert job.watched[0] == "validation"
    held_out = {image.tobytes() for image in job.validation[0]}
    assert len(job.validation[1]) == 360
    seen: set[bytes] = set()
    batches = job.batches()
    for _ in range(job.steps_per_epoch):
        seen |= {image.tobytes() for image in next(batches)[0]}
    # Two digits in the set are alike; but for those, no image is on both sides.
    assert len(seen & held_out) <= 2
    assert len(seen) > 1000
    # The batches are those of the seed, and another one holds out others.
    np.testing.assert_array_equal(
        next(job.batches())[1],
        rjax.data.batch_at(job.train, 32, seed=3, step=0)[1],
    )


@pytest.mark.parametrize("count", [1, 255, 256, 300])
def test_an_evaluation_is_the_mean_over_every_example_once(
    job: Any, count: int
) -> None:
    state = job.initial_state()
    # Last, so that it fills the batch up, is one that the model happens to get right:
    # counted more than once it would show.
    weights = {"params": rjax.get_params(job.plan, state, "master")}
    images, labels = (array[:1000] for array in job.data.train)
    right = np.argmax(job.model.apply(weights, images), -1) == labels
    order = np.concatenate([np.flatnonzero(~right), np.flatnonzero(right)])[-count:]
    examples = images[order], labels[order]
    views = all_views(job.config)
    found = Evaluator(job)(state, examples, views)
    assert list(found) == ["master", "compute", "ema"]
    for which, dtype in zip(
        views, (jnp.float32, jnp.float16, jnp.float32), strict=True
    ):
        weights = {"params": rjax.get_params(job.plan, state, which)}
        logits = job.model.apply(weights, examples[0].astype(dtype))
        assert logits.dtype == dtype
        labels = examples[1]
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), labels
        )
        tolerance = 1e-5 if dtype == jnp.float32 else 2e-3
        np.testing.assert_allclose(found[which]["loss"], losses.mean(), rtol=tolerance)
        hits = int((np.argmax(logits, -1) == labels).sum())
        assert abs(found[which]["accuracy"] * count - hits) < (
            1e-6 if dtype == jnp.float32 else 2
        )
        assert found[which]["count"] == count


def test_the_compute_view_is_evaluated_in_half_precision(job: Any) -> None:
    evaluator = Evaluator(job)
    state, batch = job.initial_state(), (job.data.test, np.ones(359, bool))
    text = evaluator._program(("compute",)).lower(state, batch).as_text()
    assert "f16" in text.split("dot_general", 1)[1].split("\n", 1)[0]
    text = evaluator._program(("ema",)).lower(state, batch).as_text()
    assert "f16" not in text.split("dot_general", 1)[1].split("\n", 1)[0]


@pytest.mark.parametrize("patience", [0.0, 3600.0])
def test_an_interrupt_between_fetching_and_writing_loses_no_line(
    patience: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch = Waiting.fetch

    def interrupted(self: Waiting, count: int) -> Any:
        reports = fetch(self, count)
        signal.raise_signal(signal.SIGINT)
        return reports

    # Reports are fetched as soon as they are there, or at the end of the epoch.
    monkeypatch.setattr(waiting, "PATIENCE", patience)
    monkeypatch.setattr(Waiting, "fetch", interrupted)
    assert main(SHORT) == 130
    manifest, steps = read_manifest(), len(read_lines())
    assert manifest["status"] == "interrupted"
    assert manifest["results"]["steps"] == steps
    assert 1 <= steps <= 11 if patience == 0 else steps == 11
    out, error = capsys.readouterr()
    assert f"interrupted after {steps} of 22 steps" in out and error == ""
