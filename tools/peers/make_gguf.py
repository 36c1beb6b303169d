"""Make random-weight GGUF files of a Qwen3.5 shape, in the formats llama.cpp is measured with.

    python make_gguf.py OUT_DIR [--shape qwen3.5-0.8b] [--formats bf16,q8_0,q4_0,q4_0-pure,q4_k_m]

Writes OUT_DIR/SHAPE-bf16.gguf with gguf-py, then lets llama.cpp's own quantiser make the others from it, so that
each tensor gets exactly the type a published file would have: a tied embedding is Q6_K in a `q4_0` file.
`q4_0-pure` makes it Q4_0 too, the same 4.5 bits for every matrix. Files that exist are kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

from shape import SHAPES, HybridShape

ARCH = "qwen35"
WEIGHT_STD = 0.02  # small enough that 24 residual layers stay finite in any format
# Format name -> (llama.cpp file type, whether every matrix takes that type).
QUANTISED: dict[str, tuple[int, bool]] = {
    "q8_0": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, False),
    "q4_0": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, False),
    "q4_0-pure": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True),
    "q4_k_m": (llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, False),
}


def matrices(shape: HybridShape) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and (rows, columns) of each weight matrix, in file order."""
    yield "token_embd", (shape.vocabulary, shape.hidden)
    key_dim, value_dim = shape.key_heads * shape.delta_head_dim, shape.value_heads * shape.delta_head_dim
    for layer in range(shape.layers):
        if shape.is_attention(layer):
            # The query projection also makes the output gate, head by head.
            yield f"blk.{layer}.attn_q", (2 * shape.heads * shape.head_dim, shape.hidden)
            yield f"blk.{layer}.attn_k", (shape.kv_heads * shape.head_dim, shape.hidden)
            yield f"blk.{layer}.attn_v", (shape.kv_heads * shape.head_dim, shape.hidden)
            yield f"blk.{layer}.attn_output", (shape.hidden, shape.heads * shape.head_dim)
        else:
            yield f"blk.{layer}.attn_qkv", (2 * key_dim + value_dim, shape.hidden)
            yield f"blk.{layer}.attn_gate", (value_dim, shape.hidden)
            yield f"blk.{layer}.ssm_beta", (shape.value_heads, shape.hidden)
            yield f"blk.{layer}.ssm_alpha", (shape.value_heads, shape.hidden)
            yield f"blk.{layer}.ssm_out", (shape.hidden, value_dim)
        yield f"blk.{layer}.ffn_gate", (shape.ffn, shape.hidden)
        yield f"blk.{layer}.ffn_up", (shape.ffn, shape.hidden)
        yield f"blk.{layer}.ffn_down", (shape.hidden, shape.ffn)


def small_tensors(shape: HybridShape, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that stay f32 in every format: norms, convolutions and the decay parameters."""
    conv_dim = (2 * shape.key_heads + shape.value_heads) * shape.delta_head_dim
    yield "output_norm.weight", np.ones(shape.hidden)
    for layer in range(shape.layers):
        yield f"blk.{layer}.attn_norm.weight", np.ones(shape.hidden)
        yield f"blk.{layer}.post_attention_norm.weight", np.ones(shape.hidden)
        if shape.is_attention(layer):
            yield f"blk.{layer}.attn_q_norm.weight", np.ones(shape.head_dim)
            yield f"blk.{layer}.attn_k_norm.weight", np.ones(shape.head_dim)
        else:
            yield f"blk.{layer}.ssm_conv1d.weight", rng.normal(0, 0.3, (conv_dim, shape.conv_width))
            yield (
                f"blk.{layer}.ssm_a",
                -rng.uniform(0.5, 4.0, shape.value_heads),
            )  # -exp(A_log): the state decays
            yield f"blk.{layer}.ssm_dt.bias", rng.uniform(-6.0, -2.0, shape.value_heads)
            yield f"blk.{layer}.ssm_norm.weight", np.ones(shape.delta_head_dim)


def add_metadata(writer: gguf.GGUFWriter, name: str, shape: HybridShape) -> None:
    writer.add_name(f"{name} (random weights)")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(262144)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(shape.rotary_dim)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(shape.conv_width)
    writer.add_ssm_state_size(shape.delta_head_dim)
    writer.add_ssm_group_count(shape.key_heads)
    writer.add_ssm_time_step_rank(shape.value_heads)
    writer.add_ssm_inner_size(shape.value_heads * shape.delta_head_dim)
    writer.add_full_attention_interval(shape.attention_every)
    # No tokenizer: the measurements feed token ids.
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(shape.vocabulary)


def write_bf16(path: Path, name: str, shape: HybridShape) -> None:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, ARCH)
    add_metadata(writer, name, shape)
    for tensor, values in small_tensors(shape, rng):
        writer.add_tensor(tensor, values.astype(np.float32))
    bf16 = gguf.GGMLQuantizationType.BF16
    for tensor, (rows, columns) in matrices(shape):
        values = rng.standard_normal((rows, columns), np.float32) * np.float32(WEIGHT_STD)
        writer.add_tensor(f"{tensor}.weight", gguf.quants.quantize(values, bf16), raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(source: Path, target: Path, format_name: str, threads: int) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype, params.pure = QUANTISED[format_name]
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    if status != 0:
        raise SystemExit(f"llama_model_quantize of {target.name} failed with status {status}")


def make(out_dir: Path, shape_name: str, formats: list[str], threads: int) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    source = out_dir / f"{shape_name}-bf16.gguf"
    for format_name in ["bf16", *(f for f in formats if f != "bf16")]:
        path = out_dir / f"{shape_name}-{format_name}.gguf"
        if not path.exists():
            partial = path.with_suffix(".partial")
            if format_name == "bf16":
                write_bf16(partial, shape_name, SHAPES[shape_name])
            else:
                quantise(source, partial, format_name, threads)
            partial.rename(path)
        print(f"{path} {path.stat().st_size / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3.5-0.8b")
    parser.add_argument(
        "--formats", default="bf16,q8_0,q4_0,q4_0-pure", help=f"of bf16,{','.join(QUANTISED)}"
    )
    parser.add_argument("--threads", type=int, default=2, help="of the quantiser")
    args = parser.parse_args()
    formats = args.formats.split(",")
    if unknown := [f for f in formats if f != "bf16" and f not in QUANTISED]:
        parser.error(f"unknown formats {', '.join(unknown)}; there are bf16, {', '.join(QUANTISED)}")
    make(args.out_dir, args.shape, formats, args.threads)


if __name__ == "__main__":
    main()
