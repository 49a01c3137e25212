"""Computes the table of ``docs/models.md``: how much memory a model takes as a GGUF file of a type.

``python benchmarks/model_sizes.py``

The bytes are those of the tensors as llama.cpp's quantiser mixes types without an importance matrix, with the cache of
``CONTEXT`` tokens in 16 bits. Sizes of models are those of their ``config.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

CONTEXT = 4096
GIGABYTE = 1e9

BLOCKS = {
    **{"F32": (1, 4), "Q4_0": (32, 18), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)},
    **{"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)},
}
"""Weights and bytes of a block, by type."""
MIXTURES = {
    "Q4_0": ("Q4_0", "Q4_0", "Q6_K"),
    "Q4_K_M": ("Q4_K", "Q6_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K", "Q6_K"),
    "Q6_K": ("Q6_K", "Q6_K", "Q6_K"),
    "Q8_0": ("Q8_0", "Q8_0", "Q8_0"),
}
"""By name of the file's type: most matrices, those with more bits, and the head."""
_FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Instead of types whose blocks do not divide the inputs."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model of the Llama or Qwen2 family.

    Attributes:
        name: as on the hub.
        layers: number of layers.
        hidden: width of the residual stream.
        heads: attention heads.
        kv_heads: heads of keys and values.
        head: size of a head.
        intermediate: width of the MLPs.
        vocabulary: number of tokens.
        tied: whether the embedding is the head, too.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int
    vocabulary: int
    tied: bool = False

    def matrices(self) -> Iterator[tuple[int, int, int]]:
        """For every matrix its rows, its inputs, and which of a mixture's types it has."""
        yield self.vocabulary, self.hidden, 2 if self.tied else 0
        if not self.tied:
            yield self.vocabulary, self.hidden, 2
        inner, outer = self.heads * self.head, self.kv_heads * self.head
        for layer in range(self.layers):
            more = int(_has_more_bits(layer, self.layers))
            yield from [(inner, self.hidden, 0), (outer, self.hidden, 0), (outer, self.hidden, more)]
            yield from [(self.hidden, inner, 0), (self.intermediate, self.hidden, 0)]
            yield from [(self.intermediate, self.hidden, 0), (self.hidden, self.intermediate, more)]

    def parameters(self) -> int:
        """Number of weights of all matrices."""
        return sum(rows * inputs for rows, inputs, _ in self.matrices())

    def matrix_bytes(self, mixture: str) -> int:
        """Bytes of all matrices in a file of a type."""
        return sum(_bytes(rows, inputs, MIXTURES[mixture][kind]) for rows, inputs, kind in self.matrices())

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of keys and values in 16 bits."""
        return 2 * 2 * self.layers * self.kv_heads * self.head * tokens


MODELS = (
    Sizes("Qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, tied=True),
    Sizes("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    Sizes("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, tied=True),
    Sizes("Llama-3.2-3B", 28, 3072, 24, 8, 128, 8192, 128256, tied=True),
    Sizes("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064),
    Sizes("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256),
    Sizes("Qwen2.5-14B", 48, 5120, 40, 8, 128, 13824, 152064),
    Sizes("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064),
    Sizes("Llama-3.3-70B", 80, 8192, 64, 8, 128, 28672, 128256),
)


def table() -> str:
    """Gigabytes of tensors and cache by model and type, in Markdown."""
    lines = ["| model | weights | " + " | ".join(f"`{name}`" for name in MIXTURES) + " | of that the cache |"]
    lines.append("| --- " * (3 + len(MIXTURES)) + "|")
    for model in MODELS:
        cache = model.cache_bytes(CONTEXT)
        sums = (f"{(model.matrix_bytes(mixture) + cache) / GIGABYTE:.1f}" for mixture in MIXTURES)
        weights = f"{model.parameters() / 1e9:.1f} billion"
        lines.append(f"| {model.name} | {weights} | {' | '.join(sums)} | {cache / GIGABYTE:.2f} |")
    return "\n".join(lines)


def _has_more_bits(layer: int, layers: int) -> bool:
    """Whether values and the MLP's last product have the mixture's second type: the outer layers, and one in three."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _bytes(rows: int, inputs: int, kind: str) -> int:
    if inputs % BLOCKS[kind][0]:
        kind = _FALLBACKS[kind]
    weights, size = BLOCKS[kind]
    return rows * inputs // weights * size


if __name__ == "__main__":
    print(table())
