"""How far llama.cpp is from itself on one file when only the order or width of its attention's arithmetic changes.

    python against_itself.py MODEL.gguf [--tokens 32] [--threads 1]

For the prompts of reference.py: how many greedy continuations are equal to those of the default settings, and the deviation of the
logits after equal tokens. Needs llama-cpp-python and numpy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import llama_cpp
import numpy as np
from reference import PROMPTS

F32 = 0
SETTINGS = {
    "default": {},
    "flash attention": {"flash_attn": True},
    "keys and values in f32": {"type_k": F32, "type_v": F32},
}


def follow(llama: llama_cpp.Llama, text: str, forced: list[int] | None, tokens: int) -> tuple[list[int], np.ndarray]:
    """Greedy tokens, and the logits after the forced ones, or after the greedy ones."""
    llama.reset()
    llama.eval(llama.tokenize(text.encode(), add_bos=True, special=False))
    chosen, rows = [], []
    for i in range(tokens):
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama.ctx, -1), (llama.n_vocab(),))
        rows.append(np.array(logits))
        chosen.append(int(np.argmax(logits)))
        llama.eval([forced[i] if forced else chosen[-1]])
    return chosen, np.array(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    first: list[tuple[list[int], np.ndarray]] = []
    for name, setting in SETTINGS.items():
        llama = llama_cpp.Llama(
            str(args.model), n_ctx=512, n_threads=args.threads, n_threads_batch=args.threads, verbose=False, **setting
        )
        greedy = [follow(llama, text, None, args.tokens) for text in PROMPTS]
        if not first:
            first = greedy
        equal = sum(ours[0] == theirs[0] for ours, theirs in zip(greedy, first))
        forced = [follow(llama, text, theirs[0], args.tokens)[1] for text, theirs in zip(PROMPTS, first)]
        apart = np.mean([np.std(ours - theirs[1], axis=1).mean() for ours, theirs in zip(forced, first)])
        print(f"{name}: {equal} of {len(PROMPTS)} equal, logits deviate by {apart:.3f}", flush=True)


if __name__ == "__main__":
    main()
