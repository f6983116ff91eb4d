"""A 64-bit digest of the raw bits of arrays."""

from rjax.ops.digest.api import digest, digest_slots

__all__ = ["digest", "digest_slots"]
