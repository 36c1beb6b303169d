"""Shows where the time of a decode step goes, from a file of trace.c.

    python3 tools/timeline/steps.py trace.tsv [OTHER.tsv]

For each kernel of a step, by name and number of blocks: how many there are, how long one runs, and by how much it
moves the step on (from the end of all kernels before it to its own end). These sum up to the step. With a second file
the last column is its sum minus that of the first.
"""

import statistics
import sys
from collections import defaultdict

FIRST = "embedding_rows"  # the kernel by which steps are told apart
STEPS = 40


def steps_of(path):
    """The median time of a step in us, and per kernel its number, duration and advance in us in one step."""
    with open(path, encoding="utf-8") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    rows = sorted((int(begin), int(end), name, int(size)) for begin, end, name, size in rows)
    first = [i for i, row in enumerate(rows) if row[2].startswith(FIRST)]
    if len(first) <= STEPS:
        sys.exit(f"{path}: {len(first)} steps, more than {STEPS} are needed: decode more tokens")
    first = first[-STEPS - 1 :]
    times = [(rows[b][0] - rows[a][0]) / 1000 for a, b in zip(first, first[1:])]
    kernels = defaultdict(lambda: [0, 0.0, 0.0])
    done = rows[first[0] - 1][1]
    for begin, end, name, size in rows[first[0] : first[-1]]:
        kernel = kernels[name.split("(")[0], size]
        kernel[0] += 1
        kernel[1] += (end - begin) / 1000
        kernel[2] += max(0, end - done) / 1000
        done = max(done, end)
    return statistics.median(times), {key: [value / STEPS for value in kernel] for key, kernel in kernels.items()}


def main():
    time, kernels = steps_of(sys.argv[1])
    other_time, others = steps_of(sys.argv[2]) if len(sys.argv) > 2 else (None, {})
    print(f"a step takes {time:.1f} us" + (f", the other's {other_time:.1f} us" if other_time else ""))
    print(f"{'kernel':28} {'blocks':>7} {'number':>7} {'runs, us':>9} {'advance':>9} {'sum':>9}")
    for key in dict.fromkeys([*kernels, *others]):
        number, runs, advance = kernels.get(key, [0, 0.0, 0.0])
        line = f"{key[0][:28]:28} {key[1]:7} {number:7.1f} {runs / (number or 1):9.2f} {advance / (number or 1):9.2f} {advance:9.1f}"
        print(line + (f" {others.get(key, [0, 0, 0])[2] - advance:+9.1f}" if other_time else ""))


if __name__ == "__main__":
    main()
