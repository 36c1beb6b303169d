"""Write a trained model as a checkpoint folder: Hugging Face names, MLX affine quantisation at 8 bits.

    python3 export.py --weights PARTS_OR_CHECKPOINT --tokenizer FOLDER --out ../../models/demo

A matrix W is stored in groups of 64 along its rows as `weight` (u32, four 8-bit codes each, the first in the low byte),
`scales` and `biases` (bf16): W = scales * code + biases. Everything else (norms, `conv1d`, `A_log`, `dt_bias`) is bf16
and follows the Hugging Face conventions: norm weights are offsets from one, `conv1d` is (C, 1, K).
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import Config, LanguageModel

GROUP, BITS = 64, 8
PART_BYTES = 15 << 20


def quantize(weight: Tensor) -> dict[str, Tensor]:
    """Affine codes of each group of 64. Scale and bias are rounded to bf16 first, so that the codes fit what is stored."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / (2**BITS - 1)).clamp_min(1e-8).bfloat16()
    biases = low.bfloat16()
    codes = ((groups - biases.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 2**BITS - 1)
    packed = codes.to(torch.uint8).view(rows, columns).contiguous().view(torch.int32).view(torch.uint32)
    return {"weight": packed, "scales": scales, "biases": biases}


def dequantize(weight: Tensor, scales: Tensor, biases: Tensor) -> Tensor:
    codes = weight.view(torch.uint8).view(weight.shape[0], -1, GROUP).float()
    return (codes * scales.float()[..., None] + biases.float()[..., None]).flatten(1)


def is_quantized(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and name.endswith(".weight") and tensor.shape[1] % GROUP == 0


def checkpoint_tensors(model: LanguageModel) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in model.state_dict().items():
        if is_quantized(name, tensor):
            stem = name.removesuffix("weight")
            tensors |= {stem + part: value for part, value in quantize(tensor).items()}
        else:
            tensors[name] = tensor.bfloat16()
    return tensors


def config_json(c: Config, end_of_text: int) -> dict:
    quantization = {"group_size": GROUP, "bits": BITS, "mode": "affine"}
    rotated = int(c.head_dim * c.partial_rotary_factor)
    text = {
        "model_type": "qwen3_5_text",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "layer_types": c.layer_types,
        "full_attention_interval": c.full_attention_interval,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "linear_num_key_heads": c.linear_num_key_heads,
        "linear_num_value_heads": c.linear_num_value_heads,
        "linear_key_head_dim": c.linear_key_head_dim,
        "linear_value_head_dim": c.linear_value_head_dim,
        "linear_conv_kernel_dim": c.linear_conv_kernel_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "partial_rotary_factor": c.partial_rotary_factor,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [rotated // 4, rotated // 8, rotated // 8],
            "partial_rotary_factor": c.partial_rotary_factor,
            "rope_theta": c.rope_theta,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
        "pad_token_id": end_of_text,
        "mtp_num_hidden_layers": 1,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "text_config": text,
        "tie_word_embeddings": True,
        "quantization": quantization,
        "quantization_config": quantization,
    }


def save_parts(model: LanguageModel, folder: Path) -> None:
    """The weights in bf16, as files of at most 15 MB."""
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in model.state_dict().items():
        tensor = tensor.bfloat16().cpu().contiguous()
        if sum(t.nbytes for t in parts[-1].values()) + tensor.nbytes > PART_BYTES:
            parts.append({})
        parts[-1][name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    for i, part in enumerate(parts):
        save_file(part, folder / f"weights-{i}.safetensors")


def load_weights(path: Path) -> LanguageModel:
    """From a training checkpoint (.pt), a folder of parts, or a finished checkpoint folder (dequantised to float32)."""
    if path.suffix == ".pt":
        state = torch.load(path, map_location="cpu")["model"]
    else:
        files = sorted(path.glob("weights-*.safetensors")) or [path / "model.safetensors"]
        state = dequantize_all({name: t for file in files for name, t in load_file(file).items()})
    model = LanguageModel(Config(vocab_size=state["model.language_model.embed_tokens.weight"].shape[0]))
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model.eval()


def dequantize_all(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    out = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix("weight")
        if tensor.dtype == torch.uint32:
            out[name] = dequantize(tensor, tensors[stem + "scales"], tensors[stem + "biases"])
        elif not name.endswith((".scales", ".biases")):
            out[name] = tensor
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the three files of tokenizer.py")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if args.tokenizer.resolve() != args.out.resolve():
            shutil.copy(args.tokenizer / name, args.out / name)
    model = load_weights(args.weights)
    end_of_text = json.loads((args.out / "generation_config.json").read_text())["pad_token_id"]
    (args.out / "config.json").write_text(json.dumps(config_json(model.config, end_of_text), indent=2) + "\n")
    save_file(checkpoint_tensors(model), args.out / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    main()
