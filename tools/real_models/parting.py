"""Where keel and llama.cpp part on the same quantised file, and how far apart the two tokens are in exact products.

    python parting.py REFERENCE.json MODEL.gguf [--keel target/release/keel]

REFERENCE.json is of reference.py for the same file. For each prompt whose greedy continuations part: the token, llama.cpp's
distance to the runner-up, the distance of llama.cpp's and keel's token in keel's exact and fast logits, and the deviation of
keel's fast logits from its exact ones. Needs numpy and safetensors.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


class Keel:
    def __init__(self, program: Path, model: Path) -> None:
        self.program, self.model = program, model

    def run(self, command: str, *args: str) -> str:
        line = [str(self.program), command, *args, "--model", str(self.model)]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout

    def greedy(self, text: str, count: int) -> list[int]:
        flags = ["--raw", "--temperature", "0", "--max-tokens", str(count), "--ignore-eos", "--json"]
        return json.loads(self.run("generate", text, *flags))["tokens"]

    def logits(self, ids: list[int], compute: str) -> np.ndarray:
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/logits.safetensors"
            self.run("logits", "--ids", ",".join(map(str, ids)), "--compute", compute, "--out", out)
            return load_file(out)["logits"][-1].astype(np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reference", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--keel", type=Path, default=Path("target/release/keel"))
    args = parser.parse_args()
    keel = Keel(args.keel, args.model)
    prompts = json.loads(args.reference.read_text())["prompts"]
    equal = 0
    for prompt in prompts:
        theirs = prompt["greedy"]
        ours = keel.greedy(prompt["text"], len(theirs))
        at = next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
        if at is None:
            equal += 1
            continue
        ids = prompt["ids"] + theirs[:at]
        exact, fast = keel.logits(ids, "f32"), keel.logits(ids, "auto")
        apart = [logits[theirs[at]] - logits[ours[at]] for logits in (exact, fast)]
        print(
            f"token {at:2}: llama.cpp's margin {prompt['margin'][at]:.3f}, theirs over ours {apart[0]:+.3f} exact, "
            f"{apart[1]:+.3f} fast; deviation of the logits {np.std(fast - exact):.3f}"
        )
    print(f"{equal} of {len(prompts)} are equal")


if __name__ == "__main__":
    main()
