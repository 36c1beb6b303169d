#!/usr/bin/env python3
"""Attacks a server of its own on loopback, and checks that it holds. Needs Python 3.9 and Linux, nothing else.

    cargo build --release -p keel
    tools/drill/drill.py                       # 10,000 requests, 3,000 connections: some five minutes
    tools/drill/drill.py --short               # under a minute, with bounds that a busy machine keeps

The server that is attacked is started here and runs the built-in model. Nothing else is contacted. Every wait and every number is
bounded; the exit code is 0 if all held. A seed makes the order of requests the same each time.
"""

import argparse
import signal
import sys
import time

from attacks import abandoned_prompts, grammars, half_open, large_texts, slow_masks, soak, strangers, unfinished_bodies
from programs import hostile_folders, keys, outputs, wrong_settings
from server import BUDGET, MB, Server, resident, wait_until
from watch import Watch


def ends(server):
    """SIGTERM with half-open connections: it ends by itself."""
    open_ones = [server.connect() for _ in range(5)]
    time.sleep(0.2)
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    code = server.process.wait(timeout=20)
    took = time.monotonic() - start
    for connection in open_ones:
        connection.close()
    assert code == 0 and took < 8, f"code {code} after {took:.1f} s"
    return took


def shown(memory):
    return f"{memory['all'] / MB:.1f} MB (anonymous {memory['anonymous'] / MB:.1f}, files {memory['files'] / MB:.1f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keel", default="target/release/keel", help="the program")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=3_000)
    parser.add_argument("--health-ms", type=float, default=100, help="the slowest answer of /health that holds")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--excess", type=float, default=0.05, help="resident memory beyond the start and the memory of requests that holds")
    parser.add_argument("--growth", type=float, default=0.01, help="the growth of resident memory that holds")
    parser.add_argument("--short", action="store_true",
                        help="250 requests, 300 connections; health within 1,000 ms, memory within 10%%")
    options = parser.parse_args()
    options.folder_s = 30 if options.short else 5
    options.masks_s = 20 if options.short else 4
    if options.short:
        options.requests, options.connections, options.health_ms, options.growth = 250, 300, 1000, 0.1
    server = Server(options.keel)
    at_start = server.resident()
    print(f"start: {shown(resident(server.process.pid))}")
    failures = []
    try:
        soak(server, options, min(500, options.requests // 2), options.seed)
        wait_until("nothing runs", 60, server.is_idle)
        ready, descriptors = server.resident_at_rest(), server.descriptors()
        observer = Watch(server)
        phases = [strangers, half_open, large_texts, unfinished_bodies, abandoned_prompts, grammars, slow_masks,
                  wrong_settings, keys, hostile_folders, outputs,
                  lambda s, o: soak(s, o, options.requests, options.seed + 1)]
        for phase in phases:
            name = phase.__name__.strip("<>")
            name = "soak" if name == "lambda" else name
            start = time.monotonic()
            try:
                phase(server, options)
            except AssertionError as problem:
                failures.append(f"{name}: {problem}")
            took, (slowest, most) = time.monotonic() - start, observer.end_of_phase()
            print(f"{name}: {took:.1f} s, health within {slowest * 1000:.0f} ms, {shown(most)} at most", flush=True)
        wait_until("nothing runs", 60, server.is_idle)
        observer.end()
        end = server.resident_at_rest()
        print(f"resident: {at_start / MB:.1f} MB at the start, {shown(ready)} after the first requests, {shown(observer.most)} at most, "
              f"{shown(end)} at the end; {server.renderers()} renderers; "
              f"health within {observer.slowest * 1000:.0f} ms; {descriptors} descriptors before, {server.descriptors()} after")
        checks = [
            (observer.failures == 0, f"health failed {observer.failures} times"),
            (observer.slowest * 1000 <= options.health_ms, f"health took {observer.slowest * 1000:.0f} ms"),
            (observer.most["all"] <= (at_start + BUDGET) * (1 + options.excess), "resident memory went beyond the plan and the memory of requests"),
            (end["all"] <= ready["all"] * (1 + options.growth), f"resident memory has grown by more than {options.growth:.0%}"),
            (server.ledger("allocated") == server.ledger("planned") != {}, "the ledger does not read what was planned"),
            (server.renderers() <= 3, "more processes render templates than threads that need them"),
            (server.metric("keel_idle_losses_total") == 0, "pages or bytes were missing when nothing ran"),
            (not any("panicked" in line or "bug in keel" in line for line in server.lines), "the log tells of a bug"),
        ]
        failures += [problem for held, problem in checks if not held]
        # The server may still be closing the connection that the last check has asked by.
        wait_until("descriptors are given back", 10, lambda: server.descriptors() <= descriptors)
        print(f"ended {ends(server):.1f} s after SIGTERM")
    except AssertionError as problem:
        failures.append(str(problem))
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(20)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    print("all held" if not failures else f"{len(failures)} did not hold")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
