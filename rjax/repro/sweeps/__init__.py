"""One run under several settings, and what came out, side by side."""

from rjax.repro.sweeps.driver import sweep
from rjax.repro.sweeps.outcome import Setting, Sweep

__all__ = ["Setting", "Sweep", "sweep"]
