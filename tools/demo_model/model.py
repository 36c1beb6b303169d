"""The `qwen3_5` text architecture with its multi-token-prediction (MTP) head, for training and for checking.

Parameters carry the names of a Hugging Face checkpoint, so exporting is writing them out: `model.language_model.*` is the
trunk, `mtp.*` the head. RMS norm weights are offsets from one, except the norm inside the gated delta net.

Glossary: B sequences, T tokens, H/KV query and key-value heads, D head size, Hk/Hv key and value heads of the gated
delta rule, Dk/Dv their sizes, K convolution width.
"""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gated_delta


@dataclass(frozen=True)
class Config:
    vocab_size: int = 4096
    hidden_size: int = 384
    intermediate_size: int = 768
    num_hidden_layers: int = 12
    full_attention_interval: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 3
    linear_num_value_heads: int = 6
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 4096
    dropout: float = 0.0  # of each branch before it joins the residual stream; training only

    @property
    def layer_types(self) -> list[str]:
        every = self.full_attention_interval
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(self.num_hidden_layers)]


@dataclass
class LayerCache:
    """What one layer remembers of the tokens before: keys and values, or the convolution's inputs and the state."""

    k: Tensor | None = None  # (B, KV, T, D)
    v: Tensor | None = None
    conv: Tensor | None = None  # (B, K - 1, channels)
    state: Tensor | None = None  # (B, Hv, Dk, Dv)


@dataclass
class Cache:
    layers: list[LayerCache]
    length: int = 0

    @staticmethod
    def empty(layers: int) -> "Cache":
        return Cache([LayerCache() for _ in range(layers)])


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)).to(x.dtype)


class GatedRmsNorm(nn.Module):
    """Norm of the gated delta net's output: the weight is NOT an offset, and SiLU of z gates the result."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight * F.silu(z.float())


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class GatedDeltaNet(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.Hk, self.Hv = c.linear_num_key_heads, c.linear_num_value_heads
        self.Dk, self.Dv, self.K = c.linear_key_head_dim, c.linear_value_head_dim, c.linear_conv_kernel_dim
        self.channels = 2 * self.Hk * self.Dk + self.Hv * self.Dv
        self.in_proj_qkv = linear(c.hidden_size, self.channels)
        self.in_proj_z = linear(c.hidden_size, self.Hv * self.Dv)
        self.in_proj_a = linear(c.hidden_size, self.Hv)
        self.in_proj_b = linear(c.hidden_size, self.Hv)
        self.conv1d = nn.Conv1d(self.channels, self.channels, self.K, groups=self.channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.Hv).uniform_(1, 16).log())
        step = torch.exp(torch.empty(self.Hv).uniform_(math.log(1e-3), math.log(1e-1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step
        self.norm = GatedRmsNorm(self.Dv, c.rms_norm_eps)
        self.out_proj = linear(self.Hv * self.Dv, c.hidden_size)

    def forward(self, x: Tensor, cache: LayerCache | None) -> Tensor:
        B, T, _ = x.shape
        mixed = F.silu(self.convolve(self.in_proj_qkv(x), cache)).float()
        q, k, v = mixed.split([self.Hk * self.Dk, self.Hk * self.Dk, self.Hv * self.Dv], -1)
        q, k = (l2_norm(y.view(B, T, self.Hk, self.Dk)).repeat_interleave(self.Hv // self.Hk, 2) for y in (q, k))
        beta = self.in_proj_b(x).float().sigmoid()
        log_decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        state = cache.state if cache and cache.state is not None else x.new_zeros(B, self.Hv, self.Dk, self.Dv, dtype=torch.float)
        with torch.autocast(x.device.type, enabled=False):
            rule = gated_delta.recurrent if T == 1 else gated_delta.chunked
            out, state = rule(q * self.Dk**-0.5, k, v.view(B, T, self.Hv, self.Dv), beta, log_decay, state)
        if cache:
            cache.state = state
        z = self.in_proj_z(x).view(B, T, self.Hv, self.Dv)
        return self.out_proj(self.norm(out, z).flatten(2).to(x.dtype))

    def convolve(self, qkv: Tensor, cache: LayerCache | None) -> Tensor:
        """Causal depthwise convolution; the cache keeps the last K - 1 rows of its input."""
        T = qkv.shape[1]
        if cache and cache.conv is not None:
            padded = torch.cat([cache.conv, qkv], 1)
        else:
            padded = F.pad(qkv, (0, 0, self.K - 1, 0))
        if cache:
            cache.conv = padded[:, T:].clone()
        kernel = self.conv1d.weight[:, 0].to(qkv.dtype)
        return sum(padded[:, j : j + T] * kernel[:, j] for j in range(self.K))


def l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.H, self.KV, self.D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = linear(c.hidden_size, self.H * 2 * self.D)  # per head: query, then output gate
        self.k_proj = linear(c.hidden_size, self.KV * self.D)
        self.v_proj = linear(c.hidden_size, self.KV * self.D)
        self.o_proj = linear(self.H * self.D, c.hidden_size)
        self.q_norm = RmsNorm(self.D, c.rms_norm_eps)
        self.k_norm = RmsNorm(self.D, c.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: LayerCache | None, mask: Tensor | None = None) -> Tensor:
        """`mask` (queries, keys), true where a query may look; None is causal."""
        B, T, _ = x.shape
        q, gate = self.q_proj(x).view(B, T, self.H, 2 * self.D).chunk(2, -1)
        q = rotate(self.q_norm(q).transpose(1, 2), rope)
        k = rotate(self.k_norm(self.k_proj(x).view(B, T, self.KV, self.D)).transpose(1, 2), rope)
        v = self.v_proj(x).view(B, T, self.KV, self.D).transpose(1, 2)
        if cache:
            if cache.k is not None:
                k, v = torch.cat([cache.k, k], 2), torch.cat([cache.v, v], 2)
                if mask is None:
                    mask = torch.ones(T, k.shape[2], dtype=torch.bool, device=x.device).tril(k.shape[2] - T)
            cache.k, cache.v = k, v
        k, v = (y.repeat_interleave(self.H // self.KV, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid())


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Partial rotary embedding over half-split pairs of the first dimensions. For text, mrope has one position."""
    cos, sin = rope
    n = cos.shape[-1]
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


def rope_table(c: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    n = int(c.head_dim * c.partial_rotary_factor)
    angle = positions[:, None].float() * c.rope_theta ** (-torch.arange(0, n, 2, device=positions.device) / n)
    return angle.cos(), angle.sin()


class Mlp(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = linear(c.hidden_size, c.intermediate_size)
        self.up_proj = linear(c.hidden_size, c.intermediate_size)
        self.down_proj = linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: Config, kind: str) -> None:
        super().__init__()
        self.kind, self.dropout = kind, c.dropout
        self.input_layernorm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(c.hidden_size, c.rms_norm_eps)
        if kind == "full_attention":
            self.self_attn = Attention(c)
        else:
            self.linear_attn = GatedDeltaNet(c)
        self.mlp = Mlp(c)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: LayerCache | None = None, mask: Tensor | None = None) -> Tensor:
        h = self.input_layernorm(x)
        h = self.self_attn(h, rope, cache, mask) if self.kind == "full_attention" else self.linear_attn(h, cache)
        x = x + F.dropout(h, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)


class Trunk(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c, kind) for kind in c.layer_types)
        self.norm = RmsNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Hidden states (B, T, hidden) AFTER the last norm: what the output head and the MTP head read."""
        past = cache.length if cache else 0
        rope = rope_table(self.config, torch.arange(past, past + ids.shape[1], device=ids.device))
        x = self.embed_tokens(ids)
        x = F.dropout(x, self.config.dropout, self.training)
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, cache.layers[i] if cache else None)
        if cache:
            cache.length += ids.shape[1]
        return self.norm(x)


class MtpHead(nn.Module):
    """Drafts the token after the next one from the hidden state of a token and the embedding of the next."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.pre_fc_norm_embedding = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_fc_norm_hidden = RmsNorm(c.hidden_size, c.rms_norm_eps)
        self.fc = linear(2 * c.hidden_size, c.hidden_size)
        self.layers = nn.ModuleList([Block(c, "full_attention")])
        self.norm = RmsNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, hidden: Tensor, embeds: list[Tensor]) -> list[Tensor]:
        """Hidden states of the drafts 1..len(embeds). `embeds[d]` (B, T, hidden) belongs to the token d + 1 after each position.

        The first draft reads the trunk's hidden state; each further one reads the head's own output, as a runtime does
        that drafts several tokens. Its keys are those of the first draft at all positions up to its own, then those
        of the further drafts of its own position alone: the positions in between have not been verified yet.
        """
        T = hidden.shape[1]
        position = torch.arange(T, device=hidden.device)
        causal = position[:, None] >= position[None, :]
        own = position[:, None] == position[None, :]
        cache, outputs = LayerCache(), []
        for depth, embed in enumerate(embeds):
            x = torch.cat([self.pre_fc_norm_embedding(embed), self.pre_fc_norm_hidden(hidden)], -1)
            mask = torch.cat([causal] + [own] * depth, 1) if depth else None
            remember = cache if len(embeds) > 1 else None
            x = self.layers[0](self.fc(x), rope_table(self.config, position + depth), remember, mask)
            hidden = self.norm(x)
            outputs.append(hidden)
        return outputs


class LanguageModel(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.model = nn.ModuleDict({"language_model": Trunk(c)})
        self.mtp = MtpHead(c)
        self.apply(self.init_weights)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                weight.data.div_(math.sqrt(2 * c.num_hidden_layers))

    @staticmethod
    def init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    @property
    def trunk(self) -> Trunk:
        return self.model["language_model"]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.trunk.embed_tokens.weight)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> Tensor:
        return self.logits(self.trunk(ids, cache))

    def draft_hidden(self, ids: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
        """Hidden states of drafts 1..depth; `ids` (B, T + depth) are the tokens, `hidden` (B, T, hidden) the trunk's."""
        T = hidden.shape[1]
        return self.mtp(hidden, [self.trunk.embed_tokens(ids[:, d : d + T]) for d in range(1, depth + 1)])


@torch.no_grad()
def generate(
    model: LanguageModel, prompts: Tensor, count: int, stop: set[int], temperature: float = 0.0, top_k: int = 40
) -> list[list[int]]:
    """Up to `count` tokens after each row of `prompts` (B, T); a stop token ends a row's list and belongs to it.

    At temperature 0 each token is the most likely one, else it is drawn from the `top_k` most likely.
    """
    cache, feed, steps = Cache.empty(model.config.num_hidden_layers), prompts, []
    running = torch.ones(len(prompts), dtype=torch.bool)
    stops = torch.tensor(sorted(stop))
    for _ in range(count):
        logits = model.logits(model.trunk(feed, cache)[:, -1])
        if temperature == 0.0:
            feed = logits.argmax(-1, keepdim=True)
        else:
            best, index = (logits / temperature).topk(top_k)
            feed = index.gather(-1, torch.multinomial(best.softmax(-1), 1))
        steps.append(feed[:, 0])
        running &= ~torch.isin(feed[:, 0], stops)
        if not running.any():
            break
    return [cut_after_stop(row, stop) for row in torch.stack(steps, 1).tolist()]


def cut_after_stop(ids: list[int], stop: set[int]) -> list[int]:
    end = next((i for i, token in enumerate(ids) if token in stop), len(ids))
    return ids[: end + 1]
