"""The model shapes that the peers are measured on. Weights are random: only sizes matter for speed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HybridShape:
    """A dense Qwen3.5 text model: Gated DeltaNet layers with full attention every `attention_every`-th layer."""

    hidden: int
    layers: int
    attention_every: int
    heads: int  # query heads of the attention layers
    kv_heads: int
    head_dim: int
    rotary_dim: int
    key_heads: int  # of the gated delta rule
    value_heads: int
    delta_head_dim: int  # keys and values alike: llama.cpp has one size for both
    conv_width: int
    ffn: int
    vocabulary: int  # input and output embeddings are tied

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.attention_every == 0


SHAPES: dict[str, HybridShape] = {
    "qwen3.5-0.8b": HybridShape(
        hidden=1024,
        layers=24,
        attention_every=4,
        heads=8,
        kv_heads=2,
        head_dim=256,
        rotary_dim=64,
        key_heads=16,
        value_heads=16,
        delta_head_dim=128,
        conv_width=4,
        ffn=3584,
        vocabulary=248320,
    ),
}
