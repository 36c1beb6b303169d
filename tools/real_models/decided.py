"""Record greedy continuations by llama.cpp of a quantised file that do not hang on how activations are rounded.

    python decided.py MODEL.gguf OUT.json [--margin 0.5] [--tokens 32] [--threads 1]

Of the prompts below it keeps, in order, the first ten of whose tokens each leads the runner-up by at least the margin. OUT.json is as
reference.py writes it. Why this is needed: llama.cpp's own logits move by a deviation of 0.1 to 0.2 on the same file when only its
attention is computed in another order, which turns nearer ties over (docs/notebook/numerics.md). Needs llama-cpp-python and numpy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from reference import opened, record, write

PROMPTS = [
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10,",
    "2, 4, 6, 8, 10, 12, 14, 16,",
    "10, 20, 30, 40, 50, 60, 70,",
    "100, 99, 98, 97, 96, 95, 94,",
    "5, 10, 15, 20, 25, 30, 35, 40,",
    "3, 6, 9, 12, 15, 18, 21, 24,",
    "A B C D E F G H I J K",
    "a, b, c, d, e, f, g, h,",
    "January, February, March, April, May, June,",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday,",
    "The cat sat on the mat. The cat sat on the mat. The cat sat on the mat. The cat",
    "red, green, blue, red, green, blue, red, green, blue, red,",
    "left right left right left right left right left",
    "ha ha ha ha ha ha ha ha ha ha",
    "0101010101010101010101",
    "x = 1\nx = 2\nx = 3\nx = 4\nx = 5\n",
    "print(1)\nprint(2)\nprint(3)\nprint(4)\nprint(5)\n",
    "item 1\nitem 2\nitem 3\nitem 4\nitem 5\n",
    "Chapter 1\nChapter 2\nChapter 3\nChapter 4\nChapter 5\n",
    "Line 10: ok\nLine 11: ok\nLine 12: ok\nLine 13: ok\nLine 14:",
    "- [ ] one\n- [ ] two\n- [ ] one\n- [ ] two\n- [ ] one\n- [ ]",
    "I will not talk in class.\nI will not talk in class.\nI will not talk in class.\nI will",
    "row, row, row your boat, row, row, row your boat, row, row, row",
    "<td>1</td><td>2</td><td>3</td><td>4</td><td>5</td>",
    '{"id": 1, "ok": true}\n{"id": 2, "ok": true}\n{"id": 3, "ok": true}\n{"id":',
    "for i in range(10):\n    print(i)\nfor i in range(10):\n    print(i)\nfor i in",
    "one two three one two three one two three one two",
    "Tom has a dog. Ann has a cat. Tom has a dog. Ann has a cat. Tom has a",
    "dog dog dog cat cat cat dog dog dog cat cat cat dog dog",
    "2001, 2002, 2003, 2004, 2005, 2006, 2007,",
    "1+1=2, 1+2=3, 1+3=4, 1+4=5, 1+5=6,",
    "aaa bbb ccc aaa bbb ccc aaa bbb ccc aaa",
    "un, deux, trois, un, deux, trois, un, deux, trois, un,",
    "<p>Hello</p>\n<p>Hello</p>\n<p>Hello</p>\n<p>Hello</p>\n",
    "To be or not to be, that is the question. To be or not to be, that is the question. To be",
    "yes no yes no yes no yes no yes no",
    "int a;\nint b;\nint c;\nint a;\nint b;\nint c;\nint a;\n",
    "**** **** **** **** **** **** ****",
    "Q: 1? A: 1. Q: 2? A: 2. Q: 3? A: 3. Q: 4? A:",
    "tick tock tick tock tick tock tick tock",
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--margin", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    llama = opened(args.model, args.threads)
    kept = []
    for text in PROMPTS:
        made = record(llama, text, args.tokens)
        if min(made["margin"]) >= args.margin:
            kept.append(made)
        if len(kept) == 10:
            break
    print(f"{len(kept)} prompts of the first {PROMPTS.index(text) + 1} are decided")
    write(args.out, args.model, kept, margin=args.margin)


if __name__ == "__main__":
    main()
