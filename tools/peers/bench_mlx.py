"""Time mlx-lm on the CPU on a random-weight Qwen3.5 shape: the model's own forward pass and cache, no sampling.

    python bench_mlx.py --shape qwen3.5-0.8b --bits 4 --prompt 8 --gen 4

Quantised matrix products of MLX on a CPU are not tuned (below one token per second on the 0.8B shape), so ask for few
tokens at 4 or 8 bits. `--bits 16` is bfloat16, `--bits 32` float32. Prints one JSON object like bench_llama.py's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from importlib.metadata import version
from typing import Any

from shape import SHAPES, HybridShape

GROUP = 64


def text_config(shape: HybridShape) -> dict[str, object]:
    return {
        "model_type": "qwen3_5_text",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_key_head_dim": shape.delta_head_dim,
        "linear_value_head_dim": shape.delta_head_dim,
        "linear_conv_kernel_dim": shape.conv_width,
        "full_attention_interval": shape.attention_every,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "type": "default",
            "mrope_section": [11, 11, 10],
            "rope_theta": 1e7,
            "partial_rotary_factor": shape.rotary_dim / shape.head_dim,
        },
    }


def build(shape: HybridShape, bits: int) -> Any:
    import mlx.core as mx
    from mlx import nn
    from mlx_lm.models.qwen3_5 import TextModel, TextModelArgs

    model = TextModel(TextModelArgs.from_dict(text_config(shape)))
    if bits < 32:
        model.set_dtype(mx.bfloat16)
    if bits < 16:
        nn.quantize(model, group_size=GROUP, bits=bits)
    model.eval()
    mx.eval(model.parameters())
    return model


def run(model: Any, vocabulary: int, prompt: int, gen: int, rng: random.Random) -> tuple[float, float]:
    """Seconds for the prefill and for the decode, from an empty cache."""
    import mlx.core as mx

    prompt_tokens = mx.array([[rng.randrange(vocabulary) for _ in range(prompt)]])
    next_tokens = [mx.array([[rng.randrange(vocabulary)]]) for _ in range(gen)]
    cache = model.make_cache()
    start = time.perf_counter()
    # As mlx-lm's own generation does: the whole prompt but its last token runs without the output head.
    if prompt > 1:
        mx.eval(model.model(prompt_tokens[:, :-1], cache))
    logits = model(prompt_tokens[:, -1:], cache)
    mx.eval(logits)
    prefilled = time.perf_counter()
    for token in next_tokens:
        logits = model(token, cache)
        mx.eval(logits)
    end = time.perf_counter()
    if not mx.isfinite(logits).all().item():
        raise SystemExit("the logits are not sane, so the time means nothing")
    return prefilled - start, end - prefilled


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3.5-0.8b")
    parser.add_argument("--bits", type=int, choices=[4, 8, 16, 32], default=4)
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--gen", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="of the BLAS that MLX calls")
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    for variable in (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
    ):  # read when the library is loaded, in build()
        os.environ[variable] = str(args.threads)

    shape, rng = SHAPES[args.shape], random.Random(0)
    model = build(shape, args.bits)
    run(model, shape.vocabulary, 1, 1, rng)  # warm-up
    seconds = [run(model, shape.vocabulary, args.prompt, args.gen, rng) for _ in range(args.repeats)]
    print(
        json.dumps(
            {
                "engine": f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}, {args.bits} bits",
                "prompt_tokens": args.prompt,
                "generated_tokens": args.gen,
                "threads": args.threads,
                "prefill_tokens_per_second": [args.prompt / prefill for prefill, _ in seconds],
                "decode_tokens_per_second": [args.gen / decode for _, decode in seconds],
            }
        )
    )


if __name__ == "__main__":
    main()
