"""Write a GGUF file with every tensor decoded to f32.

    python dequantise.py MODEL.gguf OUT.gguf

llama.cpp rounds activations to 8 bits before it multiplies them with quantised weights, which turns near ties over. From
the decoded file it computes in f32, so that its tokens can be compared with those of an exact product.
Needs gguf and numpy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    reader = gguf.GGUFReader(args.model)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(args.out, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
