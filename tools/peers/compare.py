"""Measure keel and its peers alternately on this machine and print one Markdown table.

    python compare.py --keel target/release/keel --gguf CACHE/qwen3.5-0.8b-q4_0.gguf --rounds 5
    python compare.py --keel ... --gguf ... --prompt 8192 --gen 32 --rounds 3
    python compare.py --keel ... --model CACHE/gemma-3-270m-q4_k_m.gguf --rounds 5      the same file for both

A round runs every contender once, each in its own process, and measures the memory's read bandwidth: shared machines
drift by tens of percent within minutes, so only figures of one round are comparable. Ratios are therefore medians of
each round's ratio. A run during which other processes took more than 5% of the processors is repeated. Runs under
the Python that has llama-cpp-python (and, for --mlx, mlx-lm) installed: see setup.sh.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
CPU_TIMES = Path("/proc/stat")
BANDWIDTH_PASSES = 7
OTHERS_SHARE_MAX = 0.05  # of all processors: with spinning threads even one more busy process costs far more
ATTEMPTS = 20
PAUSE_S = 5


@dataclass
class Contender:
    """One engine on one model: how to run it, and what its runs gave, a value per round."""

    name: str
    command: list[str]
    prefill: list[float] = field(default_factory=list)  # tokens per second
    decode: list[float] = field(default_factory=list)  # tokens per second
    peak_mb: list[float] = field(default_factory=list)  # resident set, mapped weights included


@contextlib.contextmanager
def exclusive(lock: Path | None) -> Iterator[None]:
    """Hold the lock file, so that measurements of several users of one machine do not overlap."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def rate(report: dict[str, object], key: str, command: list[str]) -> float:
    """A rate of a JSON report: a number, or a list with one number per repeat."""
    value = report.get(key)
    if isinstance(value, list) and value:
        value = statistics.median(value)
    if not isinstance(value, (int, float)) or value <= 0:
        raise SystemExit(
            f"{shlex.join(command)}: expected a positive number or a list under {key!r}, got {value!r}"
        )
    return float(value)


def busy_seconds() -> float:
    """Processor time that the machine has spent on anything but idling, time stolen by its host included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, CPU_TIMES.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def run_once(contender: Contender) -> tuple[dict[str, object], float, float]:
    """The contender's report, its peak memory in MB, and the share of the processors that others took meanwhile."""
    busy, start = busy_seconds(), time.perf_counter()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(contender.command, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        capacity = (time.perf_counter() - start) * (os.cpu_count() or 1)
        others = busy_seconds() - busy - usage.ru_utime - usage.ru_stime
        out.seek(0), err.seek(0)
        if status != 0:
            tail = err.read().decode(errors="replace")[-2000:]
            raise SystemExit(
                f"{shlex.join(contender.command)}: exit {os.waitstatus_to_exitcode(status)}\n{tail}"
            )
        report = json.loads(out.read().decode().strip().splitlines()[-1])
    return report, usage.ru_maxrss * 1024 / 1e6, max(0.0, others) / capacity


def run(contender: Contender, lock: Path | None) -> None:
    """Run the contender until one run was not disturbed by other processes, and keep that run's figures."""
    for _ in range(ATTEMPTS):
        with exclusive(lock):
            report, peak_mb, others = run_once(contender)
        if others <= OTHERS_SHARE_MAX:
            break
        print(f"{contender.name}: others took {others:.0%} of the processors during the run", file=sys.stderr)
        time.sleep(PAUSE_S)
    else:
        raise SystemExit(
            f"the machine was never quiet in {ATTEMPTS} runs: stop what else runs on it, then repeat"
        )
    contender.prefill.append(rate(report, "prefill_tokens_per_second", contender.command))
    contender.decode.append(rate(report, "decode_tokens_per_second", contender.command))
    contender.peak_mb.append(peak_mb)


def build_bandwidth(folder: Path) -> Path:
    binary = folder / "bandwidth"
    flags = ["-O3", "-march=native", "-pthread"]
    subprocess.run(["gcc", *flags, str(HERE / "bandwidth.c"), "-o", str(binary)], check=True)
    return binary


def read_bandwidth(binary: Path, threads: int) -> float:
    """Median GB/s of a few passes."""
    command = [str(binary), str(threads), str(BANDWIDTH_PASSES)]
    return statistics.median(
        map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    )


def spread(values: list[float]) -> str:
    """`median (min..max)` with three digits."""

    def digits(value: float) -> str:
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"

    return f"{digits(statistics.median(values))} ({digits(min(values))}..{digits(max(values))})"


def ratio(first: list[float], other: list[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(first, other, strict=True)):.2f}"


def table(contenders: list[Contender]) -> str:
    """Rates of all contenders, and how many times faster than each other one the first is."""
    first = contenders[0]
    lines = [
        f"| engine | prefill, tok/s | {first.name} is | decode, tok/s | {first.name} is | peak memory, MB |",
        "|---|---|---|---|---|---|",
    ]
    for c in contenders:
        prefill_ratio, decode_ratio = ratio(first.prefill, c.prefill), ratio(first.decode, c.decode)
        row = (
            c.name,
            spread(c.prefill),
            f"{prefill_ratio}x",
            spread(c.decode),
            f"{decode_ratio}x",
            spread(c.peak_mb),
        )
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def contenders_of(args: argparse.Namespace) -> list[Contender]:
    sizes = ["--prompt", str(args.prompt), "--gen", str(args.gen), "--threads", str(args.threads)]
    contenders = []
    if args.keel:
        weights = ["--dtype", "bf16"] if args.bits == 16 else ["--bits", str(args.bits)]
        model = ["--model", str(args.model)] if args.model else ["--shape", args.shape, *weights]
        name = f"keel {args.model.stem}" if args.model else f"keel {args.bits} bits"
        command = [args.keel, "bench", *model, *sizes, "--repeat", "1", "--json"]
        contenders.append(Contender(name, command + shlex.split(args.keel_extra)))
    for path in [args.model, *args.gguf] if args.model else args.gguf:
        command = [sys.executable, str(HERE / "bench_llama.py"), str(path), *sizes, "--repeats", "1"]
        contenders.append(Contender(f"llama.cpp {path.stem}", command))
    if args.mlx:
        mlx_sizes = [
            "--prompt",
            str(args.mlx_prompt),
            "--gen",
            str(args.mlx_gen),
            "--threads",
            str(args.threads),
        ]
        command = [
            sys.executable,
            str(HERE / "bench_mlx.py"),
            "--shape",
            args.shape,
            "--bits",
            str(args.mlx),
            *mlx_sizes,
        ]
        contenders.append(
            Contender(f"mlx-lm {args.mlx} bits ({args.mlx_prompt} + {args.mlx_gen} tokens)", command)
        )
    return contenders


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keel", help="the keel binary")
    parser.add_argument("--keel-extra", default="", help="more arguments of `keel bench`, in one string")
    parser.add_argument("--shape", default="qwen3.5-0.8b", help="of keel and mlx-lm")
    parser.add_argument("--model", type=Path, help="a GGUF file for keel, in place of a shape, and llama.cpp")
    parser.add_argument("--bits", type=int, default=4, help="of keel's weights; 16 is bfloat16")
    parser.add_argument(
        "--gguf", type=Path, action="append", default=[], help="a file for llama.cpp; may be repeated"
    )
    parser.add_argument(
        "--mlx", type=int, choices=[4, 8, 16, 32], help="run mlx-lm too, with weights of this many bits"
    )
    parser.add_argument("--mlx-prompt", type=int, default=4)
    parser.add_argument("--mlx-gen", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--gen", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lock", type=Path, help="hold this file's lock while something is measured")
    args = parser.parse_args()
    if not (args.keel or args.gguf or args.mlx):
        parser.error("nothing to measure: give --keel, --gguf or --mlx")
    return args


def measure(args: argparse.Namespace, contenders: list[Contender]) -> dict[int, list[float]]:
    """Run all rounds; returns the read bandwidth with one thread and with all, a value per round."""
    bandwidth: dict[int, list[float]] = {threads: [] for threads in sorted({1, args.threads})}
    with tempfile.TemporaryDirectory() as folder:
        binary = build_bandwidth(Path(folder))
        for number in range(args.rounds):
            for threads, values in bandwidth.items():
                with exclusive(args.lock):
                    values.append(read_bandwidth(binary, threads))
            for contender in contenders:
                run(contender, args.lock)
                latest = f"prefill {contender.prefill[-1]:.4g}, decode {contender.decode[-1]:.4g} tok/s"
                print(f"round {number + 1}/{args.rounds}: {contender.name}: {latest}", file=sys.stderr)
    return bandwidth


def main() -> None:
    args = parse()
    contenders = contenders_of(args)
    bandwidth = measure(args, contenders)
    sizes = f"Prompt {args.prompt}, {args.gen} tokens generated, {args.threads} threads"
    print(f"{sizes}; median (min..max) of {args.rounds} rounds.\n")
    print(table(contenders))
    reads = (
        f"{threads} thread{'s' * (threads > 1)} {spread(values)}" for threads, values in bandwidth.items()
    )
    print(f"\nMemory read, GB/s: {'; '.join(reads)}.")


if __name__ == "__main__":
    main()
