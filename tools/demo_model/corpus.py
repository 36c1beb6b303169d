"""Read the training text and turn it into packed rows of token ids.

A corpus is a JSON-lines file, plain or .xz, with `prompt` and `text` in each line. `encode` tokenises it once;
`pack` then builds the rows of one epoch. A document appears either raw (`text <|endoftext|>`) or as a turn of a
conversation in the chat template. Every row starts at the start of a document, as every real use of the model does.

Ids are uint16. The top bit marks the tokens that count towards the loss: texts and the tokens that end them, not
prompts and not the template around them.
"""

import json
import lzma
import multiprocessing
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DEFINITIONS = Path(__file__).with_name("definitions.jsonl")
DEFINITION_REPEATS = 12  # in each epoch: there are few of them, and each should be known
SCORED = 1 << 15
REWORDINGS = 3  # per version of a document
RAW_SHARE = 0.4
MULTI_TURN_SHARE = 0.25  # of conversations: they get a further turn


@dataclass(frozen=True)
class Document:
    prompt: str
    text: str


def read_documents(path: Path) -> Iterator[Document]:
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            yield Document(entry["prompt"].strip(), entry["text"].strip())


@dataclass
class Ragged:
    """Many short id arrays in one: entry i is flat[offsets[i] : offsets[i + 1]]."""

    flat: np.ndarray
    offsets: np.ndarray

    def __getitem__(self, i: int) -> np.ndarray:
        return self.flat[self.offsets[i] : self.offsets[i + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @staticmethod
    def join(parts: Iterable[list[int]]) -> "Ragged":
        parts = list(parts)
        flat = np.fromiter((i for part in parts for i in part), np.uint16)
        return Ragged(flat, np.cumsum([0] + [len(part) for part in parts]))

    @staticmethod
    def chain(pieces: list["Ragged"]) -> "Ragged":
        ends = np.cumsum([0] + [len(piece.flat) for piece in pieces])
        offsets = [piece.offsets[:-1] + end for piece, end in zip(pieces, ends)]
        return Ragged(np.concatenate([piece.flat for piece in pieces]), np.concatenate([*offsets, ends[-1:]]))


@dataclass
class Encoded:
    """Versions of each document (as it stands, then with another hero), each with a few wordings of its prompt."""

    texts: Ragged  # documents x versions
    prompts: Ragged  # documents x versions x wordings

    VERSIONS = 3

    def __len__(self) -> int:
        return len(self.texts) // self.VERSIONS

    def save(self, path: Path) -> None:
        np.savez(path, tf=self.texts.flat, to=self.texts.offsets, pf=self.prompts.flat, po=self.prompts.offsets)

    @staticmethod
    def load(path: Path) -> "Encoded":
        f = np.load(path)
        return Encoded(Ragged(f["tf"], f["to"]), Ragged(f["pf"], f["po"]))


def encode(corpus: Path, tokenizer: Path, cache: Path) -> Encoded:
    """Tokenise on all cores; `cache` (.npz) keeps the result."""
    if cache.exists():
        return Encoded.load(cache)
    documents = list(read_documents(corpus)) + list(read_documents(DEFINITIONS)) * DEFINITION_REPEATS
    jobs = [(first, documents[first : first + 1000], tokenizer) for first in range(0, len(documents), 1000)]
    with multiprocessing.get_context("spawn").Pool() as pool:
        parts = pool.map(encode_batch, jobs, chunksize=1)
    encoded = Encoded(Ragged.chain([texts for texts, _ in parts]), Ragged.chain([prompts for _, prompts in parts]))
    cache.parent.mkdir(parents=True, exist_ok=True)
    encoded.save(cache)
    return encoded


def encode_batch(job: tuple[int, list[Document], Path]) -> tuple[Ragged, Ragged]:
    from tokenizers import Tokenizer  # here: packing and training need no tokenizer

    import prompts

    seed, documents, path = job
    rng, tokenizer = random.Random(seed), Tokenizer.from_file(str(path))
    texts, wordings = [], []
    for document in documents:
        renamed = prompts.rename_hero(document.prompt, document.text, rng)
        for prompt, text in ((document.prompt, document.text), renamed, prompts.recast_hero(*renamed, rng)):
            texts.append(text)
            wordings += [prompts.reword(prompt, rng) for _ in range(REWORDINGS)]
    return Ragged.join(ids_of(tokenizer, texts)), Ragged.join(ids_of(tokenizer, wordings))


def ids_of(tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]


class Template:
    """The chat template of tokenizer.py as ids. Its pieces tokenise apart: a special token or a line end parts them."""

    def __init__(self, tokenizer) -> None:
        ids = lambda text: np.array(tokenizer.encode(text).ids, np.uint16)
        self.user = ids("<|im_start|>user\n")
        self.assistant = ids("<|im_end|>\n<|im_start|>assistant\n")
        self.end = ids("<|im_end|>\n")
        self.end[0] |= SCORED
        self.end_of_text = ids("<|endoftext|>") | np.uint16(SCORED)

    def turn(self, prompt: np.ndarray, text: np.ndarray) -> list[np.ndarray]:
        return [self.user, prompt, self.assistant, text | np.uint16(SCORED), self.end]

    def raw(self, text: np.ndarray) -> list[np.ndarray]:
        return [text | np.uint16(SCORED), self.end_of_text]


def pack(encoded: Encoded, template: Template, row_length: int, seed: int) -> np.ndarray:
    """The rows (rows, row_length) of one epoch, in random order. What does not fit at the end of a row is dropped."""
    rng = np.random.default_rng(seed)
    rows, row, filled = [], [], 0
    for pieces in documents_of_epoch(encoded, template, rng):
        row += pieces
        filled += sum(len(piece) for piece in pieces)
        if filled >= row_length:
            rows.append(np.concatenate(row)[:row_length])
            row, filled = [], 0
    return np.stack(rows)


def documents_of_epoch(encoded: Encoded, template: Template, rng: np.random.Generator) -> Iterator[list[np.ndarray]]:
    order = rng.permutation(len(encoded))
    versions = rng.integers(0, Encoded.VERSIONS, len(order))
    wordings = rng.integers(0, REWORDINGS, len(order))
    raw = rng.random(len(order)) < RAW_SHARE
    more = ~np.roll(raw, -1) & (rng.random(len(order)) < MULTI_TURN_SHARE)  # a further turn must follow
    for i, document in enumerate(order):
        text = document * Encoded.VERSIONS + versions[i]
        if raw[i]:
            yield template.raw(encoded.texts[text])
        else:
            turn = template.turn(encoded.prompts[text * REWORDINGS + wordings[i]], encoded.texts[text])
            yield turn if more[i] else [*turn, template.end_of_text]


def heldout_rows(corpus: Path, tokenizer, template: Template, row_length: int, chat: bool) -> list[np.ndarray]:
    """Each held-out document alone, as it stands, cut at row_length."""
    rows = []
    for document in read_documents(corpus):
        prompt, text = (np.array(tokenizer.encode(part).ids, np.uint16) for part in (document.prompt, document.text))
        pieces = template.turn(prompt, text)[:-1] + [template.end[:1]] if chat else template.raw(text)
        rows.append(np.concatenate(pieces)[:row_length])
    return rows
