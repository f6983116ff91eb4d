"""The parts of `benchmarks/train_throughput.py`."""
