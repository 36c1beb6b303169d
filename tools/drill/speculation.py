#!/usr/bin/env python3
"""Runs requests with drafts through a server of random weights, and checks that no memory grows. Needs Python 3.9, nothing else.

    cargo build --release -p keel
    tools/drill/speculation.py --shape qwen3.5-122b-a10b --bits 5 --device cuda:0 --seconds 240

Two servers run after each other: one verifies drafts, one takes them without checking. After each request the planned, allocated and
peak bytes of each category must be the same, and the same as at the start; no page is missing and nothing was prepared late. On a GPU
the bytes that `nvidia-smi` shows are compared, too: after the first request they may not grow. The exit code is 0 if all held.
"""

import argparse
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

HOST = "127.0.0.1"
MIB = 1 << 20
STATE = ("kv", "recurrent", "delta_log", "checkpoints")


class TooLate(Exception):
    pass


def left(deadline):
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TooLate("the time of --seconds is over")
    return seconds


class Server:
    """A `keel serve` with random weights."""

    def __init__(self, args, optimistic, deadline):
        command = [args.keel, "serve", "--shape", args.shape, "--bits", str(args.bits), "--group-size", str(args.group_size),
                   "--device", args.device, "--drafts", str(args.drafts), "--drafts-always", "--sequences", "2",
                   "--context", str(args.context), "--port", "0"]
        if optimistic:
            command.append("--drafts-optimistic")
        print("$", " ".join(command), flush=True)
        self.started = time.monotonic()
        self.log = tempfile.TemporaryFile(mode="w+")
        self.process = subprocess.Popen(command, stderr=self.log, env={**os.environ, "NO_COLOR": "1"})
        self.port = None
        while self.port is None:
            time.sleep(min(0.2, left(deadline)))
            found = re.search(r"is served at http://127\.0\.0\.1:(\d+)", self.said())
            self.port = int(found.group(1)) if found else None
            if self.port is None and self.process.poll() is not None:
                sys.exit("the server did not start:\n" + self.said())
        self.ready_s = time.monotonic() - self.started

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def ask(self, method, path, body=None, deadline=None):
        connection = http.client.HTTPConnection(HOST, self.port, timeout=left(deadline))
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, body and json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def end(self, deadline):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=left(deadline))


class Memory:
    """The bytes that the server's metrics and the driver show."""

    def __init__(self, text, on_gpu):
        self.by_kind = {"planned": {}, "allocated": {}, "peak": {}}
        for line in text.splitlines():
            found = re.match(r"keel_memory_bytes\{(.*)\} (\d+)", line)
            if found:
                labels = dict(re.findall(r'(\w+)="(\w+)"', found.group(1)))
                self.by_kind[labels["kind"]][labels["category"]] = int(found.group(2))
        self.late = counter(text, "keel_late_work_total")
        self.lost = counter(text, "keel_idle_losses_total")
        self.drafts = counter(text, "keel_drafts_total")
        self.accepted = counter(text, "keel_drafts_accepted_total")
        self.smi = nvidia_smi() if on_gpu else None

    def total(self, kind):
        return sum(self.by_kind[kind].values())

    def state(self):
        return sum(self.by_kind["allocated"].get(category, 0) for category in STATE)


def counter(text, name):
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in text.splitlines() if re.match(name + r"[ {]", line))


def nvidia_smi():
    """MiB in use on the first GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return int(answer.stdout.split()[0])


def check(name, now, first, failures):
    planned = now.by_kind["planned"]
    for kind in ("allocated", "peak"):
        if now.by_kind[kind] != planned:
            failures.append(f"{name}: {kind} {now.by_kind[kind]} differs from planned {planned}")
    if now.by_kind != first.by_kind:
        failures.append(f"{name}: bytes changed since the first request")
    if now.late or now.lost:
        failures.append(f"{name}: {now.late} late preparations, {now.lost} losses at idle")


def run(args, optimistic, deadline):
    """Returns a line of the summary, and what did not hold."""
    mode = "optimistic" if optimistic else "verified"
    on_gpu = args.device.startswith("cuda")
    before = nvidia_smi() if on_gpu else None
    server = Server(args, optimistic, deadline)
    failures, first, now, tokens, longest = [], None, None, 0, 0.0
    try:
        start, numbers = time.monotonic(), random.Random(7)
        for i in range(args.requests):
            prompt = [numbers.randrange(args.ids) for _ in range(args.prompt)]
            body = {"prompt": prompt, "max_tokens": args.tokens, "temperature": 0, "ignore_eos": True}
            asked = time.monotonic()
            status, answer = server.ask("POST", "/v1/completions", body, deadline)
            longest = max(longest, time.monotonic() - asked)
            made = json.loads(answer)["usage"]["completion_tokens"] if status == 200 else 0
            if made != args.tokens:
                failures.append(f"{mode} {i}: status {status}, {made} tokens: {answer[:200]}")
            tokens += made
            now = Memory(server.ask("GET", "/metrics", deadline=deadline)[1], on_gpu)
            first = first or now
            check(f"{mode} {i}", now, first, failures)
        seconds = time.monotonic() - start
        if on_gpu and now.smi > first.smi:
            failures.append(f"{mode}: nvidia-smi grew from {first.smi} to {now.smi} MiB")
        if now.drafts == 0 or (optimistic and now.accepted != now.drafts):
            failures.append(f"{mode}: {now.accepted} of {now.drafts} drafts accepted")
        code = server.end(deadline)
        if code != 0:
            failures.append(f"{mode}: the server ended with {code}")
        after = nvidia_smi() if on_gpu else None
        line = (f"{mode}: ready {server.ready_s:.1f} s; {args.requests} requests, {tokens} tokens in {seconds:.1f} s, longest "
                f"{longest:.2f} s; {now.drafts} drafts, {now.accepted} accepted; planned = {now.total('planned')}, allocated = "
                f"{now.total('allocated')}, peak = {now.total('peak')} bytes ({now.total('planned') / MIB:.1f} MiB), states "
                f"{first.state()} to {now.state()} bytes; late {now.late}, lost {now.lost}")
        if on_gpu:
            line += f"; nvidia-smi MiB: before {before}, after request 1 {first.smi}, after the last {now.smi}, ended {after}"
        return line, failures
    except (TooLate, OSError, subprocess.TimeoutExpired) as error:
        return f"{mode}: {type(error).__name__}: {error}\n{server.said()[-2000:]}", failures + [f"{mode}: it did not finish"]
    finally:
        server.process.kill()
        server.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keel", default="target/release/keel")
    parser.add_argument("--shape", required=True)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=512, help="ids of a prompt")
    parser.add_argument("--ids", type=int, default=256, help="ids are drawn below this")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=600, help="for all of it")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    lines, failures = [], []
    for optimistic in (False, True):
        try:
            line, failed = run(args, optimistic, deadline)
        except TooLate as error:
            line, failed = f"{'optimistic' if optimistic else 'verified'}: {error}", [str(error)]
        print(line, flush=True)
        lines.append(line)
        failures += failed
    print("\nsummary of", args.shape, "in", args.bits, "bits on", args.device)
    for line in lines:
        print(" -", line)
    for failure in failures[:10]:
        print(" FAILED", failure)
    print("all held" if not failures else f"{len(failures)} did not hold")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
