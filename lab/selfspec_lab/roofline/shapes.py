"""The sizes of the papers' models, as their configs publish them."""

from dataclasses import dataclass
from typing import Any

from selfspec.errors import InvalidParameterError


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers with grouped-query attention and a gated MLP.

    Attributes:
        hidden: entries of a hidden state.
        layers: decoder layers.
        heads: query heads.
        key_heads: heads of keys and values.
        head_dim: entries of a head.
        intermediate: entries between the products of the MLP.
        vocab: tokens.
    """

    hidden: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Outputs and inputs of the products of one layer: queries, keys and values; output; gate and up; down."""
        joined = (self.heads + 2 * self.key_heads) * self.head_dim
        return (
            (joined, self.hidden),
            (self.hidden, self.heads * self.head_dim),
            (2 * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        )

    @property
    def layer_weights(self) -> int:
        """Weights of the products of one layer."""
        return sum(outputs * inputs for outputs, inputs in self.products)

    @property
    def head_weights(self) -> int:
        """Weights of the LM head."""
        return self.vocab * self.hidden

    @property
    def slot_numbers(self) -> int:
        """Numbers of one token's keys and values, all layers together."""
        return 2 * self.layers * self.key_heads * self.head_dim


MODELS = {
    "Llama-2-7B": ModelShape(4096, 32, 32, 32, 128, 11008, 32000),
    "Llama-2-13B": ModelShape(5120, 40, 40, 40, 128, 13824, 32000),
    "Llama-2-70B": ModelShape(8192, 80, 64, 8, 128, 28672, 32000),
    "CodeLlama-7B": ModelShape(4096, 32, 32, 32, 128, 11008, 32016),
    "CodeLlama-13B": ModelShape(5120, 40, 40, 40, 128, 13824, 32016),
    "CodeLlama-34B": ModelShape(8192, 48, 64, 8, 128, 22016, 32000),
    "Llama-3-8B": ModelShape(4096, 32, 32, 8, 128, 14336, 128256),
    "Llama-3-70B": ModelShape(8192, 80, 64, 8, 128, 28672, 128256),
    "Llama-3.1-8B": ModelShape(4096, 32, 32, 8, 128, 14336, 128256),
    "Llama-3.1-70B": ModelShape(8192, 80, 64, 8, 128, 28672, 128256),
    "Llama-3.1-405B": ModelShape(16384, 126, 128, 8, 128, 53248, 128256),
    "Llama-3.2-1B": ModelShape(2048, 16, 32, 8, 64, 8192, 128256),
    "Llama-3.2-3B": ModelShape(3072, 28, 24, 8, 128, 8192, 128256),
    "Qwen3-4B": ModelShape(2560, 36, 32, 8, 128, 9728, 151936),
    "Qwen3-8B": ModelShape(4096, 36, 32, 8, 128, 12288, 151936),
    "Qwen3-14B": ModelShape(5120, 40, 40, 8, 128, 17408, 151936),
    "Qwen3-32B": ModelShape(5120, 64, 64, 8, 128, 25600, 151936),
}
"""The models of SWIFT, CLaSp, DEL and KnapSpec, by name."""


def find_shape(name: str) -> ModelShape:
    """A model of the papers by its name, in any case; raises ``InvalidParameterError`` for an unknown one."""
    for known, shape in MODELS.items():
        if known.lower() == name.lower():
            return shape
    raise InvalidParameterError(f"no sizes of the model {name!r}; known: {', '.join(MODELS)}")


def shape_of(config: Any) -> ModelShape:
    """The sizes in a config of transformers, of a family with grouped-query attention and a gated MLP."""
    heads = int(config.num_attention_heads)
    hidden = int(config.hidden_size)
    return ModelShape(
        hidden,
        int(config.num_hidden_layers),
        heads,
        int(getattr(config, "num_key_value_heads", None) or heads),
        int(getattr(config, "head_dim", None) or hidden // heads),
        int(config.intermediate_size),
        int(config.vocab_size),
    )
