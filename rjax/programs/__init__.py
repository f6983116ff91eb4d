"""Programs: a step compiled ahead of time, looked into, kept and reloaded."""

from rjax.programs.cache import enable_compilation_cache as enable_compilation_cache
from rjax.programs.captured import Captured as Captured
from rjax.programs.captured import Traced as Traced
from rjax.programs.captured import capture as capture
from rjax.programs.captured import load_captured as load_captured
from rjax.programs.captured import trace as trace
