"""One training, step by step, in PyTorch and in rjax."""
