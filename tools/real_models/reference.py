"""Record what llama.cpp makes of a GGUF file: token ids of ten prompts and their greedy continuations.

    python reference.py MODEL.gguf OUT.json [--tokens 32] [--threads 1]

Needs llama-cpp-python and numpy. For each prompt OUT.json holds `text`, `ids` (with the token at the beginning that the
file asks for), `greedy` (no token ends it) and `margin`, the distance of the two largest logits before each token: where
it is small, either of the two is right.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import llama_cpp
import numpy as np

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 4, 5,",
    "In 1969, the first man on the moon",
    "Le chat est assis sur",
    "  indented text\n\twith tabs and   spaces, won't you?",
    "Zürich, naïve café — 東京 😀:",
]


def record(llama: llama_cpp.Llama, text: str, tokens: int) -> dict:
    ids = llama.tokenize(text.encode(), add_bos=True, special=False)
    llama.reset()
    llama.eval(ids)
    greedy: list[int] = []
    margin: list[float] = []
    for _ in range(tokens):
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama.ctx, -1), (llama.n_vocab(),))
        second, first = np.partition(logits, -2)[-2:]
        greedy.append(int(np.argmax(logits)))
        margin.append(round(float(first - second), 4))
        llama.eval([greedy[-1]])
    return {"text": text, "ids": ids, "greedy": greedy, "margin": margin}


def opened(model: Path, threads: int) -> llama_cpp.Llama:
    return llama_cpp.Llama(str(model), n_ctx=512, n_threads=threads, n_threads_batch=threads, verbose=False, logits_all=False)


def write(out: Path, model: Path, records: list[dict], **more: float) -> None:
    head = json.dumps({"made_with": f"llama-cpp-python {llama_cpp.__version__}", "file": model.name, **more})
    # A line for each prompt, so that a change can be read.
    lines = ",\n".join(json.dumps(r, ensure_ascii=False, separators=(",", ":")) for r in records)
    out.write_text(f'{head[:-1]}, "prompts": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    llama = opened(args.model, args.threads)
    write(args.out, args.model, [record(llama, text, args.tokens) for text in PROMPTS])


if __name__ == "__main__":
    main()
