"""Measure a finished checkpoint as a runtime sees it: quantised weights, dequantised to float32.

    python3 evaluate.py --model ../../models/demo --heldout stories-heldout.jsonl.xz --out report.json

Prints and writes: the loss of the held-out texts, the share of MTP drafts that greedy decoding of held-out prompts
accepts, samples, and (into the model's folder) `expected.json`, greedy tokens for a runtime's tests.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import corpus
from export import load_weights
from model import LanguageModel, generate

DRAFTS = 3
SAMPLE_PROMPTS = [
    ("text", "Once upon a time"),
    ("text", "The old sailor had not seen the sea for ten years. One morning"),
    ("text", "It was raining, and the little dog"),
    ("chat", "Write a short story about a fox"),
    ("chat", "What is a river?"),
    ("chat", "Tell me a story about a penguin named Pip who gets lost in the fog."),
    ("chat", "Write a short conversation between Anna and Tom."),
    ("chat", "How do bees make honey?"),
    ("chat", "What is a volcano?"),
    ("chat", "Hello! Who are you?"),
]
EXPECTED_PROMPTS = [0, 1, 3, 4, 5]  # of the above


class Evaluation:
    def __init__(self, folder: Path, heldout: Path, documents: int) -> None:
        self.model = load_weights(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.template = corpus.Template(self.tokenizer)
        self.heldout, self.documents = heldout, documents
        self.stop = {self.tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")}

    def prompt_ids(self, kind: str, prompt: str) -> list[int]:
        if kind == "chat":
            prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        return self.tokenizer.encode(prompt).ids

    @torch.no_grad()
    def heldout_loss(self, chat: bool) -> dict[str, float]:
        """Mean loss per token of held-out texts and of the token that ends each, every text alone in its row."""
        rows = corpus.heldout_rows(self.heldout, self.tokenizer, self.template, 1024, chat)[: self.documents]
        rows.sort(key=len)
        total, tokens = 0.0, 0
        for first in range(0, len(rows), 32):
            ids, scored = padded(rows[first : first + 32])
            logits = self.model(ids)[:, :-1]
            losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            total += (losses * scored[:, 1:].flatten()).sum().item()
            tokens += int(scored[:, 1:].sum())
        return {"loss": total / tokens, "perplexity": math.exp(total / tokens), "tokens": tokens}

    def acceptance(self, kind: str, prompts: int, count: int) -> dict:
        """Share of the drafts that greedy decoding accepts: draft d counts when drafts 1..d all equal what the trunk says.

        Counted at every position of the decoded texts, as if a round of drafting started there.
        """
        batch = self.equal_length_prompts(kind, prompts)
        agreed, positions = np.zeros(DRAFTS), 0
        for prompt, text in zip(batch.tolist(), generate(self.model, batch, count, self.stop)):
            hits = self.agreement(torch.tensor([prompt + text]), len(prompt))
            agreed += hits.sum(0).numpy()
            positions += len(hits)
        return {"prompts": len(batch), "positions": positions, "accepted": (agreed / positions).tolist()}

    @torch.no_grad()
    def agreement(self, ids: Tensor, prompt_length: int) -> Tensor:
        """(positions, drafts) of one decoded text: one where this draft and those before it are the decoded tokens.

        The first round starts when the first token has been decoded; the last one where all its drafts can be compared.
        """
        hidden = self.model.trunk(ids)[:, : -1 - DRAFTS]
        drafts = self.model.draft_hidden(ids[:, :-1], hidden, DRAFTS)
        T, hits, alive = hidden.shape[1], [], True
        for d, draft in enumerate(drafts, 1):
            alive = (self.model.logits(draft)[0].argmax(-1) == ids[0, d + 1 : d + 1 + T]) & alive
            hits.append(alive[prompt_length - 1 :])
        return torch.stack(hits, -1).float()

    def equal_length_prompts(self, kind: str, count: int) -> Tensor:
        """Prompts of one length, so that they decode as a batch: 16 tokens of a text, or whole requests of the commonest length."""
        by_length = defaultdict(list)
        for document in corpus.read_documents(self.heldout):
            ids = self.prompt_ids(kind, document.text if kind == "text" else document.prompt)
            ids = ids[:16] if kind == "text" else ids
            by_length[len(ids)].append(ids)
        return torch.tensor(max(by_length.values(), key=len)[:count])

    def samples(self, count: int) -> Iterator[dict]:
        torch.manual_seed(0)
        for kind, prompt in SAMPLE_PROMPTS:
            ids = torch.tensor([self.prompt_ids(kind, prompt)])
            for temperature in (0.0, 0.8):
                (text,) = generate(self.model, ids, count, self.stop, temperature)
                yield {"kind": kind, "prompt": prompt, "temperature": temperature, "text": self.tokenizer.decode(text)}

    @torch.no_grad()
    def expected(self, count: int = 32) -> list[dict]:
        """Greedy tokens with the distance of the two largest logits at each, so that a near tie is recognised."""
        out = []
        for kind, prompt in (SAMPLE_PROMPTS[i] for i in EXPECTED_PROMPTS):
            ids = self.prompt_ids(kind, prompt)
            (tokens,) = generate(self.model, torch.tensor([ids]), count, self.stop)
            hidden = self.model.trunk(torch.tensor([ids + tokens]))
            best = self.model.logits(hidden)[0, len(ids) - 1 : -1].topk(2).values
            drafts = self.model.draft_hidden(torch.tensor([ids + tokens]), hidden[:, :-1], 1)[0]
            draft_ids = self.model.logits(drafts)[0, len(ids) - 1 :].argmax(-1)
            out.append(
                {
                    "kind": kind,
                    "prompt": prompt,
                    "prompt_ids": ids,
                    "greedy_ids": tokens,
                    "greedy_margin": [round(x, 4) for x in (best[:, 0] - best[:, 1]).tolist()],
                    "first_draft_ids": draft_ids.tolist(),  # entry i drafts greedy_ids[i + 1]
                }
            )
        return out


def padded(rows: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return torch.from_numpy(ids & (corpus.SCORED - 1)), torch.from_numpy(ids >> 15).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=2000, help="held-out texts whose loss is measured")
    parser.add_argument("--prompts", type=int, default=64, help="of each kind, for the acceptance of drafts")
    args = parser.parse_args()
    evaluation = Evaluation(args.model, args.heldout, args.documents)
    lines = ",\n".join(json.dumps(entry) for entry in evaluation.expected())
    (args.model / "expected.json").write_text(f"[\n{lines}\n]\n")
    report = {}
    for kind in ("text", "chat"):
        report[kind] = evaluation.acceptance(kind, args.prompts, 200)
        print(kind, report[kind], flush=True)
    for kind in ("text", "chat"):
        report[kind] |= evaluation.heldout_loss(kind == "chat")
        print(kind, report[kind], flush=True)
    report["samples"] = []
    for sample in evaluation.samples(220):
        report["samples"].append(sample)
        print(f"--- {sample['kind']} T={sample['temperature']} {sample['prompt']!r}\n{sample['text']}", flush=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
