"""Any Optax transformation as an optimizer, under the same gate."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from rjax.trees import dtype_of, flatten


@dataclasses.dataclass(frozen=True)
class OptaxOptimizer:
    """See :func:`from_optax`; equality is that of the transformation's functions.

    Attributes:
        tx: the transformation.

    Example:
        >>> import optax, rjax
        >>> tx = optax.sgd(0.1)
        >>> rjax.optim.from_optax(tx) == rjax.optim.from_optax(tx)
        True
    """

    tx: optax.GradientTransformation

    has_mu: ClassVar[bool] = False
    has_nu: ClassVar[bool] = False
    has_ratios: ClassVar[bool] = False

    def init(self, params: Any) -> Any:
        """Return the transformation's state, its numbers as arrays without weak types.

        Args:
            params: tree of f32 arrays, `None` in place of frozen parameters.

        Raises:
            ValueError: in one sentence, if it cannot be initialised on that tree, or
                by path, for a leaf that is neither an array nor a number.
        """
        opt_state = _told("init", self.tx.init, params)
        for path, leaf in flatten(opt_state)[0]:
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float):
                raise ValueError(
                    f"The Optax state must hold arrays, but {path!r} is a "
                    f"{type(leaf).__name__}; keep it in the transformation instead."
                )
        return jax.tree.map(_strong, opt_state)

    def update(self, u: Any, opt_state: Any, params: Any, loss: jax.Array) -> Any:
        """Return the transformation's updates and its next state.

        Args:
            u: tree of true gradients, f32.
            opt_state: as from :meth:`init`.
            params: tree of masters, f32.
            loss: f32[], for transformations that ask for `value`; `grad` is `u`.

        Raises:
            NotImplementedError: if it asks for more.
            ValueError: in one sentence, for trees it cannot work on, or, by path, a
                state that changes its structure, shapes or dtypes.
        """
        tx = optax.with_extra_args_support(self.tx)

        def run(params: Any) -> Any:
            return tx.update(u, opt_state, params, value=loss, grad=u)

        steps, new = _told("update", run, params)
        return steps, _like(opt_state, new)


def from_optax(tx: Any) -> OptaxOptimizer:
    """Use an Optax transformation on unscaled float32 views of the arenas.

    Any transformation serves: per-layer ones, stateful ones, masked and combined ones,
    schedules within. Its state is part of the training state, moves only on applied
    steps, and is recorded and saved like all of it. It carries its own learning rate,
    so `Config(learning_rate=None)` goes with it, and its own decay, which the path rule
    does not reach; in place of frozen parameters it sees `None`. Those that ask for
    `value` and `grad` get the mean loss of the step and the true gradient.

    Args:
        tx: an `optax.GradientTransformation`, with extra arguments or without.

    Returns:
        An optimizer for ``Config(optimizer=..., learning_rate=None)``.

    Raises:
        ValueError: if `tx` has no `init` and `update`.

    Example:
        >>> import optax
        >>> from_optax(optax.sgd(0.1)).has_mu
        False
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ValueError(
            "from_optax takes an optax.GradientTransformation, got "
            f"{type(tx).__name__}."
        )
    if isinstance(tx, optax.MultiSteps):  # which hands extra arguments on
        update: Any = tx.update
        tx = optax.GradientTransformationExtraArgs(tx.init, update)
    return OptaxOptimizer(tx)


def _told(what: str, run: Callable[[Any], Any], params: Any) -> Any:
    """Run a part of a transformation; say in one sentence what it cannot do."""
    try:
        return run(params)
    except (TypeError, ValueError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, TypeError) and "required keyword-only" in first:
            raise NotImplementedError(
                "The Optax transformation asks for an argument that the step does not "
                f"have ({first}); it gives `value` and `grad`."
            ) from error
        raise ValueError(
            f"The Optax transformation's `{what}` does not work on the trainable "
            f"parameters: {first}; give it what fits their tree, in which frozen ones "
            "are None."
        ) from error


def _strong(leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    return lax.convert_element_type(leaf, leaf.dtype) if leaf.weak_type else leaf


def _like(old: Any, new: Any) -> Any:
    """Return a new state in the types of the old one, or say by path what differs."""
    before, after = flatten(old)[0], flatten(new)[0]
    kinds = [
        {path: (tuple(np.shape(x)), str(dtype_of(jnp.asarray(x)))) for path, x in found}
        for found in (before, after)
    ]
    if kinds[0] != kinds[1]:
        path = next(iter(dict(kinds[0].items() ^ kinds[1].items())))
        raise ValueError(
            "The Optax state must keep its structure, shapes and dtypes, but "
            f"{path!r} was {kinds[0].get(path)} and became {kinds[1].get(path)}; cast "
            "it in the transformation."
        )
    return jax.tree.unflatten(jax.tree.structure(old), [_strong(x) for _, x in after])
