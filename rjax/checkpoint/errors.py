"""What goes wrong with checkpoints."""


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says why and what to do."""


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written, or was never written to its end."""
