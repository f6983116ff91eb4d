"""rjax: the recipe as `rjax train` builds it, one program an epoch."""

from typing import Any

import jax
from throughput.on_jax import environment

import rjax
from mnist.settings import Settings
from rjax.programs import hlo
from rjax.runs.evaluate import Evaluator, watched_view
from rjax.runs.setup import prepare_job


class Rig:
    """The jobs of `rjax train`, of which all seeds share the programs.

    Args:
        settings: of the runs.
    """

    def __init__(self, settings: Settings):
        self._settings = settings
        rjax.set_xla_flags()  # as `rjax train` does
        self._job = prepare_job(settings.options(settings.seeds[0]))
        self._evaluator = Evaluator(self._job)
        self._views = [watched_view(self._job.config)]

    def compile(self) -> None:
        self._program: Any = self._job.compile()
        self.reset(self._settings.seeds[0])
        self.read(self.epoch())

    def reset(self, seed: int) -> None:
        job = prepare_job(self._settings.options(seed))
        self._state = jax.block_until_ready(job.initial_state())

    def epoch(self) -> Any:
        self._state, report = self._program(self._state)
        test = self._job.data.test
        return report.loss, self._evaluator.begin(self._state, test, self._views)

    def read(self, begun: Any) -> tuple[float, float, float]:
        loss, evaluation = begun
        seen = self._evaluator.end(evaluation)[self._views[0]]
        return float(loss), seen["loss"], seen["accuracy"]

    def ending(self) -> dict[str, Any]:
        skipped, scale = jax.device_get((self._state.skipped, self._state.scale))
        return {"skipped": int(skipped), "scale": float(scale)}

    def facts(self) -> dict[str, Any]:
        steps = self._program.steps
        kernels = launches(self._program.hlo(), steps)
        return {"steps": steps, "kernels_per_step": kernels, **environment()}


def launches(text: str, steps: int) -> float:
    """Return kernels, copies and library calls of a program of so many steps, a step.

    What only waits for another (`…-done`) is left out.
    """
    runs = hlo.parse(text).launched()
    return sum(times for i, times in runs if not i.opcode.endswith("-done")) / steps
