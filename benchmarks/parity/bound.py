"""How far two correct float32 trainings may lie apart: measured in float64.

Rounding grows while a network trains, by how much no formula says. So it is measured:
the training in float64, against the same with errors of float32's size put on every
gradient and every weight, several times with other errors. The largest distance up to
each step, times a factor for what a few draws do not show, bounds the distance of any
float32 training from the one in float64.
"""

import numpy as np
import torch

from parity import in_torch
from parity.problem import Course, Problem

# A few draws of the errors, and what the largest of them is multiplied by.
_DRAWS, FACTOR = 4, 8.0


def reference(given: Problem) -> tuple[Course, np.ndarray]:
    """Return the training in float64, and the bound.

    Returns:
        The course, and float64[steps]: the largest ||w - w64|| / ||w64|| of all weights
        after each step that rounding explains.
    """
    exact = in_torch.train(given, torch.float64)
    drawn = [
        apart(in_torch.train(given, torch.float64, rounding=seed), exact)
        for seed in range(_DRAWS)
    ]
    return exact, FACTOR * np.maximum.accumulate(np.max(drawn, axis=0))


def apart(a: Course, b: Course) -> np.ndarray:
    """Return float64[steps]: ||a - b|| / ||b|| of all weights after each step."""
    pairs = zip(a.weights, b.weights, strict=True)
    return np.array([np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs])
