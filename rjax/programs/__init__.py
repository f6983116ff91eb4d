"""Programs: a step compiled ahead of time, looked into, kept and reloaded."""

from rjax.programs.cache import enable_compilation_cache as enable_compilation_cache
from rjax.programs.captured import Captured as Captured
from rjax.programs.captured_epoch import CapturedEpoch as CapturedEpoch
from rjax.programs.epoch_report import EpochReport as EpochReport
from rjax.programs.epochs import capture_epoch as capture_epoch
from rjax.programs.tracing import Traced as Traced
from rjax.programs.tracing import capture as capture
from rjax.programs.tracing import load_captured as load_captured
from rjax.programs.tracing import trace as trace
