"""The parts of `benchmarks/mnist_mlp.py`."""
