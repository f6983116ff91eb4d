"""A small transformer that predicts the next token.

It computes in the precision of its parameters. Call it as `model.apply(variables,
tokens, train=...)`. Projections and attention compute in half precision with float32
accumulation where their kernels are half; softmax, layer norm, GELU and the loss
compute in float32.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from rjax.ops.dense import dense
from rjax.ops.softmax_cross_entropy import softmax_cross_entropy

_normal = nn.initializers.normal(0.02)
_fan_in = nn.initializers.lecun_normal()
_zeros = nn.initializers.zeros


def masked_cross_entropy(
    logits: Float[Array, "*batch classes"],
    labels: Int[Array, "*batch"],
    label_smoothing: float = 0.0,
) -> Float32[Array, ""]:
    """Return the mean cross-entropy over the labels that are not negative.

    Equals `softmax_cross_entropy(logits, labels)[labels >= 0].mean()`, and 0 where no
    label counts. Over micro-batches and devices it is the mean of their means.

    Args:
      logits: any floating dtype, `[*batch, classes]`.
      labels: any integer dtype, `[*batch]`; a negative one does not count.
      label_smoothing: as for :func:`rjax.ops.softmax_cross_entropy`.

    Returns:
      float32 scalar.

    Raises:
      ValueError: as the op does.

    Example:
      >>> logits = jnp.array([[0.0, 0.0], [0.0, 200.0]])
      >>> masked_cross_entropy(logits, jnp.array([0, -1])).round(4)
      Array(0.6931, dtype=float32)
    """
    labels = jnp.asarray(labels)
    counts = labels >= 0
    known = jnp.where(counts, labels, jnp.zeros_like(labels))
    losses = softmax_cross_entropy(logits, known, label_smoothing)
    total = jnp.sum(jnp.where(counts, losses, jnp.zeros_like(losses)))
    return total / jnp.maximum(jnp.sum(counts.astype(jnp.float32)), 1.0)


class LayerNorm(nn.Module):
    """Normalise the last axis by its own mean and variance, in float32.

    Parameters `scale` and `bias` `[features]`, float32; the output has the dtype of the
    input. The variance is that of the centred values, so a large mean does no harm.

    Attributes:
      eps: added to the variance.

    Example:
      >>> layer, x = LayerNorm(), jnp.array([[1.0, 3.0]], jnp.float16)
      >>> layer.init_with_output(jax.random.key(0), x)[0]
      Array([[-1.,  1.]], dtype=float16)

    Source: Ba et al., https://arxiv.org/abs/1607.06450, section 3.
    """

    eps: float = 1e-5

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch features"]
    ) -> Float[Array, "*batch features"]:
        """Return x normalised, in its dtype."""
        shape = x.shape[-1:]
        scale = self.param("scale", nn.initializers.ones, shape, jnp.float32)
        bias = self.param("bias", _zeros, shape, jnp.float32)
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.eps)
        along = (1,) * (x.ndim - 1) + shape
        return (y * scale.reshape(along) + bias.reshape(along)).astype(x.dtype)


class LoRADense(nn.Module):
    """Multiply by a kernel, add a bias, and add a product of low rank ("LoRA").

    `x @ kernel + bias + (x @ lora_a) @ lora_b`. Parameters `kernel` and `bias` are
    those of a `Dense` in the same place; `lora_b` starts at zero, so that weights
    trained without it mean the same. Freeze all but `lora_a` and `lora_b` by the path
    rule.

    Attributes:
      features: outputs per example.
      rank: of the product; 0 leaves it out.

    Example:
      >>> variables = LoRADense(3, rank=2).init(jax.random.key(0), jnp.ones((1, 4)))
      >>> params = variables["params"]
      >>> params["lora_a"].shape, params["lora_b"].shape
      ((4, 2), (2, 3))

    Source: Hu et al., https://arxiv.org/abs/2106.09685, section 4.1.
    """

    features: int
    rank: int = 0

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch inputs"]
    ) -> Float[Array, "*batch features"]:
        """Return the sum in the kernel's dtype."""
        inputs, features, rank = x.shape[-1], self.features, self.rank
        kernel = self.param("kernel", _normal, (inputs, features), jnp.float32)
        bias = self.param("bias", _zeros, (features,), jnp.float32)
        y = dense(x, kernel, bias)
        if rank:
            down = self.param("lora_a", _fan_in, (inputs, rank), jnp.float32)
            up = self.param("lora_b", _zeros, (rank, features), jnp.float32)
            y = y + dense(dense(x, down), up).astype(y.dtype)
        return y


def causal_attention(
    mixed: Float[Array, "batch length triple"], heads: int
) -> Float[Array, "batch length features"]:
    """Attend from every position to itself and the earlier ones.

    Products are rounded to the dtype of the input once each, softmax is float32.

    Args:
      mixed: queries, keys and values side by side, `triple = 3 * features`.
      heads: into which the features of each are cut.

    Returns:
      The values averaged, in the dtype of the input.

    Example:
      >>> causal_attention(jnp.ones((1, 2, 3), jnp.float16), heads=1)[0, :, 0]
      Array([1., 1.], dtype=float16)

    Source: Vaswani et al., https://arxiv.org/abs/1706.03762, section 3.2.
    """
    batch, length, triple = mixed.shape
    size = triple // 3 // heads
    parts = mixed.reshape(batch, length, 3, heads, size)
    query, key, value = (parts[:, :, i] for i in range(3))
    # Scaled first: what a half-precision product has to hold is smaller.
    scores = jnp.einsum("bqhd,bkhd->bhqk", query * size**-0.5, key)
    earlier = jnp.tril(jnp.ones((length, length), jnp.bool_))
    earlier = jnp.broadcast_to(earlier, scores.shape)
    shares = jax.nn.softmax(scores.astype(jnp.float32), where=earlier)
    attended = jnp.einsum("bhqk,bkhd->bqhd", shares.astype(value.dtype), value)
    return attended.reshape(batch, length, triple // 3)


class TransformerBlock(nn.Module):
    """Attend to earlier positions, then transform each: pre-norm, with residuals.

    Attributes:
      heads: of the attention; they divide the features.
      dropout: share of what is added to the residual stream dropped in training.
      lora_rank: as in `LoRADense`, of all four projections.

    Example:
      >>> block, x = TransformerBlock(heads=2), jnp.ones((1, 3, 8))
      >>> sorted(block.init(jax.random.key(0), x)["params"])
      ['attend', 'mlp_in', 'mlp_out', 'norm1', 'norm2', 'project']
    """

    heads: int
    dropout: float = 0.0
    lora_rank: int = 0

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch length features"], train: bool = False
    ) -> Float[Array, "batch length features"]:
        """Return the residual stream after the block, in its dtype."""
        features = x.shape[-1]
        linear: Any = functools.partial(LoRADense, rank=self.lora_rank)
        drop = nn.Dropout(self.dropout, deterministic=not train)
        y = LayerNorm(name="norm1")(x)
        y = causal_attention(linear(3 * features, name="attend")(y), self.heads)
        x = x + drop(linear(features, name="project")(y)).astype(x.dtype)
        y = linear(4 * features, name="mlp_in")(LayerNorm(name="norm2")(x))
        y = nn.gelu(y.astype(jnp.float32)).astype(y.dtype)
        return x + drop(linear(features, name="mlp_out")(y)).astype(x.dtype)


class Transformer(nn.Module):
    """Predict the next token at every position, from that and the earlier ones.

    The embedding is also the head ("tied weights"): its two gradients are added in
    float32 and rounded once, to the precision of the view. Padding needs no mask among
    the inputs where it comes last: give its targets as -1 to `masked_cross_entropy`.

    Attributes:
      vocabulary: number of different tokens.
      features: width of the residual stream.
      layers: number of blocks.
      heads: of each block's attention; they divide the features.
      max_length: of the learned positions.
      dropout: as in `TransformerBlock`, and of the embedding; above 0 it needs a random
        key named `dropout`.
      lora_rank: as in `LoRADense`, of all projections in the blocks.

    Raises:
      ValueError: when called, for tokens that are no integers `[batch, length]` or too
        many, or heads that do not divide the features.

    Example:
      >>> model = Transformer(vocabulary=45, features=16, layers=1, heads=2)
      >>> key, tokens = jax.random.key(0), jnp.zeros((2, 8), jnp.int32)
      >>> variables = jax.eval_shape(model.init, key, tokens)
      >>> jax.eval_shape(model.apply, variables, tokens).shape
      (2, 8, 45)

    Source: Vaswani et al., https://arxiv.org/abs/1706.03762; pre-norm and initial
      values as in GPT-2, but for the narrower start of residual projections.
    """

    vocabulary: int
    features: int = 64
    layers: int = 2
    heads: int = 4
    max_length: int = 64
    dropout: float = 0.0
    lora_rank: int = 0

    @nn.compact
    def __call__(
        self, tokens: Int[Array, "batch length"], train: bool = False
    ) -> Float[Array, "batch length vocabulary"]:
        """Return logits in the dtype of the embedding."""
        self._validate(tokens)
        shape = (self.vocabulary, self.features)
        embedding = self.param("embedding", _normal, shape, jnp.float32)
        shape = (self.max_length, self.features)
        position = self.param("position", _normal, shape, jnp.float32)
        kind = embedding.dtype
        # The one float32 value that both uses share: their gradients meet there, and
        # those of a token that comes often add up there.
        table = embedding.astype(jnp.float32)
        x = table[tokens] + _rows(position.astype(jnp.float32), tokens)
        x = nn.Dropout(self.dropout, deterministic=not train)(x).astype(kind)
        for i in range(1, self.layers + 1):
            block = TransformerBlock(
                self.heads, self.dropout, self.lora_rank, name=f"block{i}"
            )
            x = block(x, train)
        return dense(LayerNorm(name="norm")(x), table.astype(kind).T)

    def _validate(self, tokens: jax.Array) -> None:
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(
                "`tokens` must be integers [batch, length], got "
                f"{tokens.dtype}{list(tokens.shape)}."
            )
        if tokens.shape[1] > self.max_length:
            raise ValueError(
                f"`tokens` must have at most max_length={self.max_length} positions, "
                f"got {tokens.shape[1]}; make the model with more."
            )
        if self.heads < 1 or self.features % self.heads:
            raise ValueError(
                f"`heads` must divide the {self.features} features, got {self.heads}."
            )


def _rows(position: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return the learned positions of every example's tokens."""
    rows = position[: tokens.shape[1]]
    return jnp.broadcast_to(rows, (*tokens.shape, position.shape[1]))
