"""One run under several settings, and what came out, side by side."""

from rjax.runs.sweeps.driver import sweep
from rjax.runs.sweeps.outcome import Setting, Sweep

__all__ = ["Setting", "Sweep", "sweep"]
