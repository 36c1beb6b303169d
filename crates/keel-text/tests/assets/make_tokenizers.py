"""Writes the two small checkpoints for the tests of this crate. Needs only Python's standard library.

    python3 make_tokenizers.py

byte_level   like Qwen: byte-level pairs, a split by regular expression, ChatML tokens added to the model's
byte_tokens  like Gemma and Llama 2: pairs of characters, spaces written as U+2581, tokens of one byte for other
             characters, a token at the beginning, one space removed from the start of decoded text

Both are trained by plain byte pair encoding on the text below, so they are the same on every machine.
"""

import collections
import json
import pathlib
import re

TEXT = """Once upon a time there was a little girl. She lived in a house near the sea with her mother and dog.
One day the little girl said to her mother, "I want to see the world." Her mother said, "The world is very big,
and you are very small. But you can take the dog with you." So the little girl and the dog walked and walked.
They saw the sun and the moon, and they saw the other side of the sea. When they came home, it was the same day.
def main(argument): return [argument, "story"]  # 12 + 345 = 357
Grüße, naïve café, déjà vu. Привет, мир. 你好，世界。 こんにちは世界。你好，世界。"""

# Contractions, words with the character before them, single digits, punctuation, white space.
SPLIT = r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
SPLIT_IN_PYTHON = SPLIT.replace(r"\p{L}+", r"[^\W\d_]+").replace(r"\p{L}\p{N}", r"\w").replace(r"\p{N}", r"\d")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def merged(word, pair):
    out, i = [], 0
    while i < len(word):
        joined = tuple(word[i : i + 2]) == pair
        out.append("".join(word[i : i + 1 + joined]))
        i += 1 + joined
    return tuple(out)


def train(words, merges_max):
    """Byte pair encoding of counted words (tuples of symbols). Returns merges, the most frequent first."""
    merges = []
    while len(merges) < merges_max:
        pairs = collections.Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if pairs[best] < 2:
            break
        merges.append(best)
        words = {merged(word, best): count for word, count in words.items()}
    return merges


def byte_alphabet():
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def added(content, token_id, special=True):
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    return dict(id=token_id, content=content, **plain, special=special)


def bpe(vocab, merges, **settings):
    defaults = dict(dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None)
    flags = dict(fuse_unk=False, byte_fallback=False, ignore_merges=False)
    return dict(type="BPE", **(defaults | flags | settings), vocab=vocab, merges=[" ".join(pair) for pair in merges])


def byte_level():
    alphabet = byte_alphabet()
    words = collections.Counter(
        tuple(alphabet[byte] for byte in word.encode()) for word in re.findall(SPLIT_IN_PYTHON, TEXT)
    )
    merges = train(words, 160)
    tokens = [alphabet[byte] for byte in sorted(alphabet, key=lambda byte: alphabet[byte])]
    tokens += list(dict.fromkeys(left + right for left, right in merges))
    vocab = {token: i for i, token in enumerate(tokens)}
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    specials = [added(name, len(vocab) + i) for i, name in enumerate(names)]
    think = [added(name, len(vocab) + 3 + i, special=False) for i, name in enumerate(["<think>", "</think>"])]
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    split = dict(type="Split", pattern={"Regex": SPLIT}, behavior="Isolated", invert=False)
    tokenizer = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=specials + think,
        normalizer=dict(type="NFC"),
        pre_tokenizer=dict(type="Sequence", pretokenizers=[split, level]),
        post_processor=level,
        decoder=level,
        model=bpe(vocab, merges),
    )
    config = dict(add_bos_token=False, bos_token=None, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML)
    end = specials[0]["id"]
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config,
        "config.json": dict(model_type="qwen3_5", text_config=dict(eos_token_id=end)),
        "generation_config.json": dict(
            do_sample=True, eos_token_id=[end + 2, end], temperature=0.7, top_k=20, top_p=0.8
        ),
    }


def byte_tokens():
    spaced = "\u2581" + TEXT.replace(" ", "\u2581")
    words = collections.Counter(tuple(word) for word in re.findall("\u2581?[^\u2581]+", spaced))
    merges = train(words, 150)
    # Tokens of one byte spell characters that are neither ASCII nor in a merge.
    in_merges = {char for pair in merges for char in "".join(pair)}
    chars = sorted(char for char in set(spaced) if char < "\x7f" or char == "\u2581" or char in in_merges)
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    tokens = names + [f"<0x{byte:02X}>" for byte in range(256)] + chars
    tokens += list(dict.fromkeys(left + right for left, right in merges))
    vocab = {token: i for i, token in enumerate(tokens)}
    steps = [
        dict(type="Replace", pattern={"String": "\u2581"}, content=" "),
        dict(type="ByteFallback"),
        dict(type="Fuse"),
        dict(type="Strip", content=" ", start=1, stop=0),
    ]
    bos = dict(id="<bos>", type_id=0)
    sequence = dict(id="A", type_id=0)
    tokenizer = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=[added(name, vocab[name]) for name in names],
        normalizer=dict(
            type="Sequence",
            normalizers=[
                dict(type="Prepend", prepend="\u2581"),
                dict(type="Replace", pattern={"String": " "}, content="\u2581"),
            ],
        ),
        pre_tokenizer=None,
        post_processor=dict(
            type="TemplateProcessing",
            single=[dict(SpecialToken=bos), dict(Sequence=sequence)],
            pair=[dict(SpecialToken=bos), dict(Sequence=sequence), dict(Sequence=sequence | dict(id="B", type_id=1))],
            special_tokens={"<bos>": dict(id="<bos>", ids=[vocab["<bos>"]], tokens=["<bos>"])},
        ),
        decoder=dict(type="Sequence", decoders=steps),
        model=bpe(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True),
    )
    token = lambda name: dict(added(name, 0), __type="AddedToken")
    config = dict(
        add_bos_token=True,
        bos_token=token("<bos>"),
        eos_token=token("<eos>"),
        pad_token=token("<pad>"),
        unk_token=token("<unk>"),
    )
    ends = [vocab["<eos>"], vocab["<end_of_turn>"]]
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": config,
        "config.json": dict(model_type="gemma3_text", eos_token_id=ends),
    }


if __name__ == "__main__":
    here = pathlib.Path(__file__).parent
    for name, files in dict(byte_level=byte_level(), byte_tokens=byte_tokens()).items():
        (here / name).mkdir(exist_ok=True)
        for file, content in files.items():
            text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
            (here / name / file).write_text(text + "\n", encoding="utf-8")
