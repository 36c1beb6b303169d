"""Makes gguf_blocks.safetensors and reference.gguf with the `gguf` package (pip install gguf safetensors).

gguf_blocks.safetensors: for each block type three blocks of random bytes, `<type>.bytes` u8, whose scales are
ordinary half floats, and `<type>.values` f32, what the package decodes them to.
reference.gguf: metadata of every type and a few small tensors, one of them quantised.
"""

import pathlib

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).parent
TYPES = gguf.GGMLQuantizationType
# Byte offsets of the half floats in a block.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}


def blocks():
    random = np.random.default_rng(7)
    tensors = {}
    for name, halves in HALVES.items():
        values, size = gguf.GGML_QUANT_SIZES[TYPES[name]]
        data = random.integers(0, 256, (3, size), dtype=np.uint8)
        for at in halves:
            scale = random.uniform(-2, 2, 3).astype(np.float16)
            data[:, at : at + 2] = scale[:, None].view(np.uint8)
        if name == "MXFP4":
            data[:, 0] = [0, 1, 130]  # two subnormal scales, and 4
        tensors[f"{name}.bytes"] = data
        tensors[f"{name}.values"] = dequantize(data, TYPES[name]).astype(np.float32)
        assert tensors[f"{name}.values"].shape == (3, values)
    save_file(tensors, HERE / "gguf_blocks.safetensors")


def reference():
    writer = gguf.GGUFWriter(HERE / "reference.gguf", "keel-test")
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -100)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -30000)
    writer.add_uint32("t.u32", 4000000000)
    writer.add_int32("t.i32", -2000000000)
    writer.add_float32("t.f32", 0.5)
    writer.add_bool("t.bool", True)
    writer.add_string("t.string", "snowman \u2603")
    writer.add_array("t.strings", ["a", "bc", ""])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_uint64("t.u64", 2**63 + 1)
    writer.add_int64("t.i64", -(2**62))
    writer.add_float64("t.f64", 0.1)
    dense = (np.arange(3 * 5, dtype=np.float32) - 7) / 4
    writer.add_tensor("dense.weight", dense.reshape(3, 5))
    writer.add_tensor("half.weight", dense.reshape(5, 3).astype(np.float16))
    stack = np.sin(np.arange(2 * 3 * 64, dtype=np.float32)).reshape(2, 3, 64)
    q8 = TYPES.Q8_0
    writer.add_tensor("experts.weight", quantize(stack, q8), raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    blocks()
    reference()
