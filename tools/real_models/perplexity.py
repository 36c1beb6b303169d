"""The perplexity of a text under a GGUF file in llama.cpp, scored as `keel eval` does.

    python perplexity.py MODEL.gguf TEXT [--window 512] [--windows N] [--threads 1]

The text is cut into windows whose first token is replaced by that of the beginning, if the file asks for one; the second
half of each is scored. Needs llama-cpp-python and numpy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import llama_cpp
import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--windows", type=int, default=1 << 30)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    llama = llama_cpp.Llama(
        str(args.model),
        n_ctx=args.window,
        n_batch=args.window,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        verbose=False,
        logits_all=True,
    )
    ids = llama.tokenize(args.text.read_bytes(), add_bos=False, special=True)
    begin = llama.tokenize(b"a", add_bos=True)[0]
    marked = begin == llama.token_bos()
    losses = []
    for start in range(0, len(ids) - args.window + 1, args.window)[: args.windows]:
        window = ids[start : start + args.window]
        if marked:
            window[0] = begin
        llama.reset()
        llama.eval(window)
        for at in range(args.window // 2, args.window - 1):
            logits = np.asarray(llama.scores[at], np.float64)
            top = logits.max()
            losses.append(top + np.log(np.exp(logits - top).sum()) - logits[window[at + 1]])
    print(f"perplexity {np.exp(np.mean(losses)):.4f} over {len(losses)} tokens")


if __name__ == "__main__":
    main()
