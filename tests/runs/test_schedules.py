"""Every schedule against its formula, written out in Python's floats."""

import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rjax.runs.errors import UsageError
from rjax.runs.options import RateOptions
from rjax.runs.schedules import build_schedule

pytestmark = pytest.mark.standard_promotion

RATE, PER_EPOCH, EPOCHS = 0.5, 10, 12
TOTAL = PER_EPOCH * EPOCHS


def rates(epochs: int = EPOCHS, **options: Any) -> np.ndarray:
    """Return the rate of every step of a run."""
    schedule = build_schedule(RateOptions(**options), RATE, PER_EPOCH, epochs)
    if not callable(schedule):
        return np.full(PER_EPOCH * epochs, schedule)
    counts = np.arange(PER_EPOCH * epochs, dtype=np.int32)
    return np.asarray(jax.vmap(schedule)(counts))


def half_cosine(share: float, final: float = 0.0) -> float:
    return final + (RATE - final) * (1 + math.cos(math.pi * share)) / 2


# What follows the warm-up, as a function of the step `t` of the run and of the steps
# `w` of the warm-up.
FORMULAS: dict[str, tuple[dict[str, Any], Any]] = {
    "constant": ({}, lambda t, w: RATE),
    "step": ({}, lambda t, w: RATE * 0.1 ** (t // 40)),
    "step, own": (
        {"decay_epochs": 2.5, "decay_rate": 0.5},
        lambda t, w: RATE * 0.5 ** (t // 25),
    ),
    "multistep": (
        {"milestones": (3.0, 7.5, 9.0)},
        lambda t, w: RATE * 0.1 ** ((t >= 30) + (t >= 75) + (t >= 90)),
    ),
    "multistep, own": (
        {"milestones": (6.0,), "decay_rate": 0.3},
        lambda t, w: RATE * (0.3 if t >= 60 else 1.0),
    ),
    "exponential": ({}, lambda t, w: RATE * 0.95 ** ((t - w) / 10)),
    "exponential, own": (
        {"decay_epochs": 3.0, "decay_rate": 0.5},
        lambda t, w: RATE * 0.5 ** ((t - w) / 30),
    ),
    "polynomial": ({}, lambda t, w: RATE * (1 - (t - w) / (TOTAL - w))),
    "polynomial, own": (
        {"power": 2.0, "final_learning_rate": 0.1},
        lambda t, w: 0.1 + 0.4 * (1 - (t - w) / (TOTAL - w)) ** 2,
    ),
    "cosine": ({}, lambda t, w: half_cosine((t - w) / (TOTAL - w))),
    "cosine, own": (
        {"final_learning_rate": 0.05},
        lambda t, w: half_cosine((t - w) / (TOTAL - w), 0.05),
    ),
    "restarts, own": (
        {"restart_epochs": 1.0, "restart_multiplier": 3.0, "final_learning_rate": 0.1},
        lambda t, w: half_cosine(
            next(
                (t - w - start) / length
                for start, length in ((40, 90), (10, 30), (0, 10))
                if t - w >= start
            ),
            0.1,
        ),
    ),
    "restarts, equal": (
        {"restart_epochs": 2.0, "restart_multiplier": 1.0},
        lambda t, w: half_cosine((t - w) % 20 / 20),
    ),
    "wsd, own": (
        {"decay_epochs": 3.0, "final_learning_rate": 0.2},
        lambda t, w: RATE if t < 90 else RATE - 0.3 * (t - 90) / 30,
    ),
}


@pytest.mark.parametrize("warmup", [0, 2], ids="warm-up {}".format)
@pytest.mark.parametrize("case", FORMULAS)
def test_a_schedule_follows_its_formula(case: str, warmup: int) -> None:
    options, formula = FORMULAS[case]
    name = case.partition(",")[0]
    found = rates(schedule=name, warmup_epochs=float(warmup), **options)
    warm = warmup * PER_EPOCH
    expected = [
        RATE * (t + 1) / (warm + 1) if t < warm else formula(t, warm)
        for t in range(TOTAL)
    ]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-7)


def test_wsd_has_a_warm_up_and_a_decay_of_its_own() -> None:
    found = rates(schedule="wsd", epochs=20)
    assert found[0] == pytest.approx(RATE / 11)
    np.testing.assert_allclose(found[10:161], RATE, rtol=1e-6)
    np.testing.assert_allclose(found[-1], RATE / 40, rtol=1e-4)


def test_restarts_are_two_periods_unless_told_otherwise() -> None:
    found = rates(schedule="restarts")
    assert found[0] == found[40] == pytest.approx(RATE)
    assert np.sum(np.diff(found) > 0) == 1


def test_a_constant_rate_is_a_number_and_can_be_replaced_in_the_state() -> None:
    options = RateOptions(schedule="constant")
    assert build_schedule(options, RATE, PER_EPOCH, EPOCHS) == RATE


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"warmup_epochs": 12.0}, "--warmup-epochs 12 leaves nothing of 12 epochs"),
        ({"schedule": "multistep"}, "needs --milestones"),
        ({"schedule": "multistep", "milestones": (3.0, 2.0)}, "must rise"),
        ({"schedule": "multistep", "milestones": (3.0, 3.0)}, "must rise"),
        ({"schedule": "multistep", "milestones": (12.0,)}, "before epoch 12"),
        (
            {"schedule": "multistep", "milestones": (2.0,), "warmup_epochs": 2.0},
            "after the warm-up",
        ),
        ({"schedule": "step", "warmup_epochs": 5.0}, "within the warm-up"),
        ({"schedule": "step", "decay_epochs": 0.01}, "less than one step"),
        ({"schedule": "exponential", "decay_epochs": 0.01}, "less than one step"),
        ({"schedule": "restarts", "restart_epochs": 0.01}, "less than one step"),
        ({"schedule": "restarts", "restart_multiplier": 0.5}, "at least 1"),
        ({"schedule": "restarts", "restart_multiplier": math.nan}, "at least 1"),
        (
            {
                "schedule": "restarts",
                "restart_epochs": 0.1,
                "restart_multiplier": 1.001,
            },
            "more than 100 periods",
        ),
        ({"final_learning_rate": 1.0}, "above the learning rate"),
        (
            {"schedule": "wsd", "decay_epochs": 12.0},
            "do not fit into 12 epochs",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(options: dict, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_schedule(RateOptions(**options), RATE, PER_EPOCH, EPOCHS)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=8)  # each compiles a schedule of its own
@given(
    name=st.sampled_from(
        ["constant", "step", "exponential", "polynomial", "cosine", "restarts", "wsd"]
    ),
    warmup=st.sampled_from([0.0, 0.1, 0.5]),
    epochs=st.integers(2, 9),
)
def test_every_rate_is_positive_and_at_most_the_highest(
    name: Any, warmup: float, epochs: int
) -> None:
    found = rates(epochs, schedule=name, warmup_epochs=warmup)
    assert np.isfinite(found).all()
    assert (found > 0).all() and (found <= RATE * (1 + 1e-6)).all()
