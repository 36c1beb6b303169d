"""Train the built-in model: trunk and MTP head together, or the head alone on a frozen trunk.

    python3 train.py --corpus stories-train.jsonl.xz --tokenizer ../../models/demo/tokenizer.json --work /tmp/demo \\
        --stage main --total-seconds 1080
    python3 train.py ... --stage mtp --total-seconds 180

The schedule follows the clock, not a number of steps: a run is planned in seconds and always ends annealed. With
`--deadline` a run stops that many seconds after its start and saves `WORK/STAGE.pt`; the same command resumes it.
"""

import argparse
import math
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

import corpus
from export import load_weights, save_parts
from model import Config, LanguageModel
from optim import make_optimizers

DRAFTS = 3  # drafts that the second stage trains; a row holds this many tokens more than the model reads
WARMUP = 0.015  # of the whole time
MTP_WEIGHT = 0.3
DEPTH_WEIGHTS = (1.0, 0.7, 0.5)


@dataclass
class Progress:
    seconds: float = 0.0  # spent in steps, over all runs
    tokens: int = 0
    epoch: int = 0
    step: int = 0


def learning_rate_factor(done: float) -> float:
    """Linear warm-up, then a cosine to zero; `done` runs from 0 to 1."""
    return min(1.0, done / WARMUP) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


def cross_entropy(hidden: Tensor, embedding: Tensor, target: Tensor, scored: Tensor) -> Tensor:
    logits = F.linear(hidden, embedding).float()
    loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return (loss * scored.flatten()).sum() / scored.sum()


def distillation(draft: Tensor, target: Tensor, embedding: Tensor, scored: Tensor) -> Tensor:
    """Cross entropy of a draft against the distribution of the frozen trunk one token on, and not against the text:
    a draft is accepted when it agrees with the trunk."""
    wanted = F.linear(target, embedding).float().softmax(-1)
    loss = -(wanted * F.linear(draft, embedding).float().log_softmax(-1)).sum(-1)
    return (loss * scored).sum() / scored.sum()


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.started = time.monotonic()
        self.tokenizer = Tokenizer.from_file(str(args.tokenizer))
        self.template = corpus.Template(self.tokenizer)
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.progress = Progress()
        config = Config(vocab_size=self.tokenizer.get_vocab_size(), dropout=args.dropout if args.stage == "main" else 0.0)
        self.model = LanguageModel(config).to(self.device)
        if args.init:
            self.model.load_state_dict(load_weights(args.init).state_dict())
        if args.stage == "mtp":
            self.load_trunk()
        self.optimizers = make_optimizers(self.model, args.matrix_lr, args.other_lr, args.weight_decay)
        self.resume()
        self.cross_entropy, self.distillation = cross_entropy, distillation
        if args.compile:
            for block in [*self.model.trunk.layers, *self.model.mtp.layers]:
                block.compile(dynamic=False)
            self.cross_entropy = torch.compile(cross_entropy, dynamic=False)
            self.distillation = torch.compile(distillation, dynamic=False)

    @property
    def checkpoint(self) -> Path:
        return self.args.work / f"{self.args.stage}.pt"

    def load_trunk(self) -> None:
        self.model.load_state_dict(torch.load(self.args.work / "main.pt", map_location=self.device)["model"])
        self.model.trunk.requires_grad_(False)

    def resume(self) -> None:
        if not self.checkpoint.exists():
            return
        saved = torch.load(self.checkpoint, map_location=self.device)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
        self.progress = Progress(**saved["progress"])
        torch.manual_seed(self.progress.step)
        print(f"resumed at {self.progress}")

    def save(self) -> None:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save({"model": self.model.state_dict(), "optimizers": optimizers, "progress": vars(self.progress)}, self.checkpoint)
        if self.args.out:
            save_parts(self.model, self.args.out)

    def batches(self):
        """Rows (batch, row_length) without end. Another process packs the next epoch meanwhile."""
        encoded = corpus.encode(self.args.corpus, self.args.tokenizer, self.args.work / "corpus.npz")
        print(f"{len(encoded)} documents, {len(encoded.texts.flat) / 2e6:.1f}M tokens of text ({self.clock():.0f} s)")
        length = self.args.context + 1 + DRAFTS
        pack = lambda pool: pool.submit(pack_epoch, self.args.work / "corpus.npz", self.args.tokenizer, length, self.args.seed + self.progress.epoch)
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            coming = pack(pool)
            while True:
                rows = torch.from_numpy(coming.result().astype(np.int32)).to(self.device)
                self.progress.epoch += 1
                coming = pack(pool)
                for first in range(0, len(rows) - self.args.batch + 1, self.args.batch):
                    yield rows[first : first + self.args.batch]

    def autocast(self):
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def main_loss(self, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        ids, scored = split(rows)
        T = self.args.context
        embedding = self.model.trunk.embed_tokens.weight
        with self.autocast():
            hidden = self.model.trunk(ids[:, :T])
            draft = self.model.draft_hidden(ids[:, : T + 1], hidden, 1)[0]
            loss = self.cross_entropy(hidden, embedding, ids[:, 1 : T + 1], scored[:, 1 : T + 1])
            mtp = self.cross_entropy(draft, embedding, ids[:, 2 : T + 2], scored[:, 2 : T + 2])
        return loss + MTP_WEIGHT * mtp, [loss.detach(), mtp.detach()]

    def mtp_loss(self, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        ids, scored = split(rows)
        T = self.args.context
        embedding = self.model.trunk.embed_tokens.weight
        self.model.trunk.eval()
        with self.autocast():
            with torch.no_grad():
                hidden = self.model.trunk(ids[:, :T])
            drafts = self.model.draft_hidden(ids, hidden, DRAFTS)
            losses = []
            for d, draft in enumerate(drafts, 1):
                # The trunk at position t + d has read the d tokens that the head was given and predicts the same token.
                target = torch.cat([hidden[:, d:], hidden[:, :d]], 1)
                valid = scored[:, d + 1 : d + 1 + T] * (torch.arange(T, device=ids.device) < T - d)
                losses.append(self.distillation(draft, target, embedding, valid))
        return sum(w * loss for w, loss in zip(DEPTH_WEIGHTS, losses)), [loss.detach() for loss in losses]

    def clock(self) -> float:
        return time.monotonic() - self.started

    def run(self) -> None:
        loss_of = self.main_loss if self.args.stage == "main" else self.mtp_loss
        self.model.train()
        stream = self.batches()
        self.step(loss_of, next(stream), 0.0)  # compiles; not on the schedule's clock
        synchronize(self.device)
        print(f"first step after {self.clock():.0f} s")
        base, start, sums, shown = self.progress.seconds, time.monotonic(), None, self.progress.step
        while True:
            done = self.progress.seconds / self.args.total_seconds
            if done >= 1.0 or self.clock() > self.args.deadline:
                break
            parts = torch.stack(self.step(loss_of, next(stream), learning_rate_factor(done)))
            sums = parts if sums is None else sums + parts
            self.progress.step += 1
            self.progress.tokens += self.args.batch * self.args.context
            if self.progress.step % 10 == 0:
                synchronize(self.device)  # keeps the clock honest
            self.progress.seconds = base + time.monotonic() - start
            if self.progress.step % self.args.report == 0:
                self.report(sums / (self.progress.step - shown), self.progress.seconds - base)
                sums, shown = None, self.progress.step
        self.model.eval()
        print("held out:", self.evaluate(self.args.heldout_batches))
        self.save()
        print(f"saved after {self.clock():.0f} s: {self.progress}")

    def step(self, loss_of, rows: Tensor, factor: float) -> list[Tensor]:
        loss, parts = loss_of(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return parts

    def trained(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def report(self, parts: Tensor, seconds: float) -> None:
        p = self.progress
        rate = self.args.report * self.args.batch * self.args.context / (seconds - getattr(self, "reported", 0.0))
        self.reported = seconds
        losses = " ".join(f"{x:.4f}" for x in parts.tolist())
        line = f"step {p.step} epoch {p.epoch} {p.seconds:.0f} s {p.tokens / 1e6:.0f}M tokens {rate / 1e3:.0f}k/s loss {losses}"
        if p.step % (10 * self.args.report) == 0:
            self.model.eval()
            line += f" | held out {self.evaluate(2)}"
            self.model.train()
        print(line, flush=True)

    @torch.no_grad()
    def evaluate(self, batches: int) -> dict[str, float]:
        """Loss per token of held-out texts, raw and answering their prompt, and how often the drafts agree with the trunk."""
        result = {}
        with torch.compiler.set_stance("force_eager"):
            for name, chat in (("raw", False), ("chat", True)):
                rows = self.heldout(chat)[: batches * 128]
                sums = sum(self.heldout_sums(rows[first : first + 128]) for first in range(0, len(rows), 128))
                result[name] = round((sums[0] / sums[1]).item(), 4)
                result[name + " drafts"] = [round(x, 3) for x in (sums[2:] / sums[1]).tolist()]
        return result

    def heldout_sums(self, rows: Tensor) -> Tensor:
        ids, scored = split(rows)
        T = ids.shape[1] - DRAFTS
        with self.autocast():
            hidden = self.model.trunk(ids)
            drafts = self.model.draft_hidden(ids, hidden[:, :T], DRAFTS)
            logits = self.model.logits(hidden).float()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            best, agree, sums = logits.argmax(-1), torch.ones(ids.shape[0], T, device=ids.device), []
            for d, draft in enumerate(drafts, 1):
                wanted = best[:, d : d + T]
                agree = agree * (self.model.logits(draft).argmax(-1) == wanted)
                sums.append((agree * scored[:, d : d + T]).sum())
        return torch.stack([(loss * scored[:, 1:].flatten()).sum(), scored[:, 1:].sum(), *sums]).float()

    def heldout(self, chat: bool) -> Tensor:
        """Held-out documents, one a row, padded with unscored tokens."""
        if not hasattr(self, "heldout_cache"):
            self.heldout_cache = {}
        if chat not in self.heldout_cache:
            rows = corpus.heldout_rows(self.args.heldout, self.tokenizer, self.template, 448, chat)
            padded = np.zeros((len(rows), 448), np.int32)
            for i, row in enumerate(rows):
                padded[i, : len(row)] = row
            self.heldout_cache[chat] = torch.from_numpy(padded).to(self.device)
        return self.heldout_cache[chat]


def split(rows: Tensor) -> tuple[Tensor, Tensor]:
    return (rows & (corpus.SCORED - 1)).long(), (rows >> 15).float()


def pack_epoch(encoded: Path, tokenizer: Path, row_length: int, seed: int) -> np.ndarray:
    template = corpus.Template(Tokenizer.from_file(str(tokenizer)))
    return corpus.pack(corpus.Encoded.load(encoded), template, row_length, seed)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="jsonl or jsonl.xz with `prompt` and `text`")
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of checkpoints and of the tokenised corpus")
    parser.add_argument("--out", type=Path, help="also save the weights here, in bf16, in files of at most 15 MB")
    parser.add_argument("--stage", choices=("main", "mtp"), default="main")
    parser.add_argument("--init", type=Path, help="start from these weights: a folder that --out or export.py wrote")
    parser.add_argument("--total-seconds", type=float, required=True, help="length of the whole schedule")
    parser.add_argument("--deadline", type=float, default=math.inf, help="stop this run this many seconds after its start")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--context", type=int, default=768)
    parser.add_argument("--matrix-lr", type=float, default=0.02)
    parser.add_argument("--other-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.04)
    parser.add_argument("--dropout", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=int, default=50)
    parser.add_argument("--heldout-batches", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    Trainer(args).run()


if __name__ == "__main__":
    main()
