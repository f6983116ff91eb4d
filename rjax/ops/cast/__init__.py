"""Range casts between float32 and half precision."""

from rjax.ops.cast.api import cast

__all__ = ["cast"]
