"""The arenas that an optimizer step moves."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Arenas(NamedTuple):
    """What moves in one optimizer step; `None` for what is not kept.

    Attributes:
        master: float32[n], weights.
        compute: half[n - b], their copy in half precision, without the first b.
        mu: float32[n], first moment or momentum.
        nu: float32[n], second moment.
        ema: float32[n], average of the weights.
        ema_compute: half[n - b], its copy in half precision.
    """

    master: Float[Array, " n"]
    compute: Float[Array, " k"] | None = None
    mu: Float[Array, " n"] | None = None
    nu: Float[Array, " n"] | None = None
    ema: Float[Array, " n"] | None = None
    ema_compute: Float[Array, " k"] | None = None
