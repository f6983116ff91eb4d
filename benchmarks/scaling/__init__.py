"""The parts of `benchmarks/weak_scaling.py` and `benchmarks/scale_plan.py`."""
