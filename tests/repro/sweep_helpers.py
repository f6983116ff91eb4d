"""Sweeps whose runs are written, not trained: the driver keeps finished ones."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
from compare_helpers import some_run

from rjax.runs.sweeps import axes
from rjax.runs.sweeps.driver import _WORDS

WORDS = ("--data", "digits", "--epochs", "2")


def write_runs(
    out: Path, settings: dict[str, list[str]], seeds: list[int]
) -> dict[str, dict[str, Any]]:
    """Write a finished run for every choice and seed; return results by folder.

    The masters of a run depend on its seed and, after 7 steps, on its precision.
    """
    found = {}
    for i, choice in enumerate(axes.choices(settings)):
        for seed in seeds:
            folder = out / "runs" / f"{choice.folder},seed={seed}"
            rng = np.random.default_rng([i, seed])
            run = some_run(20)
            run.digests[:, 0] += np.uint32(seed)
            if dict(choice.values).get("precision") == "fp16":
                run.digests[8:, 0] += np.uint32(100)
            run.floats("scale")[10:] = 2.0**i
            words = ["train", *WORDS, *choice.words, *_WORDS, "--seed", str(seed)]
            results = {
                "steps": 20,
                "train": {
                    "skipped": int(rng.integers(3)), "scale": 2.0**i,
                    "images_per_second": float(rng.uniform(1e3, 2e3)),
                },
                "test": {"master": {"loss": float(rng.random()),
                                    "accuracy": float(rng.uniform(0.8, 1))}},
            }  # fmt: skip
            run.manifest = {
                "status": "finished",
                "command": shlex.join(["rjax", *words, "--out", str(folder)]),
                "versions": {"python": "3.11", "jax": "0.10.2"},
                "device": {"count": 1, "kind": "cpu"},
                "results": results,
            }
            run.write(folder)
            rows = [{"step": s, "loss": float(rng.random())} for s in (10, 20)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "evaluations.jsonl").write_text(text)
            found[str(folder)] = results | {"course": rows}
    return found


def script(path: Path, text: str) -> str:
    """Write a program that stands for an interpreter, and return its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)
