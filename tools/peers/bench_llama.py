"""Time llama.cpp on a GGUF file through llama_decode alone: no sampling, no Python per token but one call.

    python bench_llama.py MODEL.gguf --prompt 512 --gen 128 --threads 2 --repeats 5

Each repeat clears the memory, prefills `prompt` random tokens (logits of the last one only) and decodes `gen` more
after them, so decoding happens at contexts of prompt .. prompt + gen. `--prompt 8192` gives the long-context figures.
Prints one JSON object with a rate per repeat, in tokens per second.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import time

import llama_cpp
import numpy as np

WARM_UP_PROMPT, WARM_UP_GEN = 64, 4


class Bench:
    """One loaded model and its context, with room for `capacity` tokens."""

    def __init__(self, model_path: str, threads: int, capacity: int, log: bool) -> None:
        # llama.cpp calls this for every log line; it must outlive the context.
        self._log = llama_cpp.llama_log_callback(
            lambda _level, text, _data: print(text.decode(), end="") if log else None
        )
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_load_model_from_file(
            model_path.encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise SystemExit(f"llama.cpp could not load {model_path}; --log shows why")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = capacity
        params.n_batch = (
            capacity  # a whole prompt in one call; llama.cpp cuts it into micro-batches of n_ubatch (512)
        )
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit(f"llama.cpp could not make a context of {capacity} tokens; --log shows why")
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.rng = random.Random(0)

    def random_tokens(self, count: int) -> ctypes.Array[ctypes.c_int32]:
        return (llama_cpp.llama_token * count)(*(self.rng.randrange(self.vocabulary) for _ in range(count)))

    def decode(self, tokens: ctypes.Array[ctypes.c_int32]) -> None:
        """Run the tokens after those of the context and wait until the last one's logits are there."""
        status = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(tokens, len(tokens)))
        if status != 0:
            raise SystemExit(f"llama_decode of {len(tokens)} tokens failed with status {status}")
        llama_cpp.llama_synchronize(self.context)

    def check_logits(self) -> None:
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, -1), (self.vocabulary,))
        if not np.isfinite(logits).all() or logits.std() == 0:
            raise SystemExit("the logits are not sane, so the time means nothing")

    def run(self, prompt: int, gen: int) -> tuple[float, float]:
        """Seconds for the prefill and for the decode."""
        prompt_tokens = self.random_tokens(prompt)
        next_tokens = [self.random_tokens(1) for _ in range(gen)]
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        start = time.perf_counter()
        self.decode(prompt_tokens)
        prefilled = time.perf_counter()
        for token in next_tokens:
            self.decode(token)
        return prefilled - start, time.perf_counter() - prefilled


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--log", action="store_true", help="print llama.cpp's own log")
    args = parser.parse_args()

    bench = Bench(args.model, args.threads, args.prompt + args.gen, args.log)
    bench.run(min(args.prompt, WARM_UP_PROMPT), WARM_UP_GEN)
    bench.check_logits()
    seconds = [bench.run(args.prompt, args.gen) for _ in range(args.repeats)]
    print(
        json.dumps(
            {
                "engine": f"llama.cpp in llama-cpp-python {llama_cpp.__version__}",
                "system": llama_cpp.llama_print_system_info().decode(),
                "model_bytes": llama_cpp.llama_model_size(bench.model),
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
