"""Times `keel serve` and llama.cpp's server on one GGUF file, in turn, with the same clients.

    pip install "llama-cpp-python[server]==0.3.36" httpx
    python compare_servers.py --keel target/release/keel --model FILE.gguf --clients 16 --requests 32 --rounds 2

Each client streams one completion after the other. All prompts differ from their first word on, so that neither side
reuses a prefix. `--idle` connections are open meanwhile. A token is what the usage counts, or an event of the stream where there is none.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time

import httpx

WORDS = "river stone lamp garden winter letter market silver bridge morning kettle violin harbour engine copper window".split()


def prompt(i: int, words: int) -> str:
    return " ".join(WORDS[(i * 7 + j * (i % 13 + 3)) % len(WORDS)] for j in range(words)) + f" {i}."


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


SERVERS = {"keel": "keel serve", "llama": "llama.cpp's server"}


def commands(args, port: int) -> dict[str, list[str]]:
    threads = str(args.threads)
    both = {
        SERVERS["keel"]: [args.keel, "serve", "--model", args.model, "--port", str(port), "--threads", threads,
                       "--context", str(args.context), "--sequences", str(args.clients)],
        # It answers one request at a time; without the last option a new one would end the one that runs.
        SERVERS["llama"]: [sys.executable, "-m", "llama_cpp.server", "--model", args.model, "--port", str(port),
                               "--n_threads", threads, "--n_threads_batch", threads, "--n_ctx", str(args.context),
                               "--interrupt_requests", "false"],
    }
    return both if args.only is None else {SERVERS[args.only]: both[SERVERS[args.only]]}


async def complete(client: httpx.AsyncClient, model: str, text: str, tokens: int) -> tuple[float, float, int]:
    """Seconds to the first token and in all, and tokens, of one answer."""
    body = {"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}
    began, first, events, usage = time.perf_counter(), None, 0, None
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[len("data: "):])
            usage = event.get("usage") or usage
            if event["choices"] and event["choices"][0]["text"]:
                events += 1
                first = first or time.perf_counter() - began
    count = usage["completion_tokens"] if usage else events
    return first or 0.0, time.perf_counter() - began, count


async def touch(client: httpx.AsyncClient, connections: int):
    """A small request on each of the connections, which are kept."""
    for reply in await asyncio.gather(*(client.get("/v1/models") for _ in range(connections))):
        reply.raise_for_status()


async def load(url: str, args) -> dict[str, float]:
    kept = httpx.Limits(max_connections=args.idle, max_keepalive_connections=args.idle, keepalive_expiry=None)
    limits = httpx.Limits(max_connections=args.clients)
    async with (httpx.AsyncClient(base_url=url, timeout=None, limits=kept) as idle,
                httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client):
        await touch(idle, args.idle)
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await complete(client, model, prompt(10_000, args.words), args.tokens)
        waiting = iter(range(args.requests))
        answers = []

        async def one_client():
            for i in waiting:
                answers.append(await complete(client, model, prompt(i, args.words), args.tokens))

        began = time.perf_counter()
        await asyncio.gather(*(one_client() for _ in range(args.clients)))
        seconds = time.perf_counter() - began
        await touch(idle, args.idle)
    firsts, alls = sorted(a[0] for a in answers), sorted(a[1] for a in answers)
    return {"tokens/s": sum(a[2] for a in answers) / seconds, "tokens": sum(a[2] for a in answers),
            "first token p50, ms": statistics.median(firsts) * 1e3, "first token max, ms": firsts[-1] * 1e3,
            "answer p50, s": statistics.median(alls), "answer max, s": alls[-1]}


def measure(name: str, args) -> dict[str, float]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(commands(args, port)[name], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                httpx.get(f"{url}/v1/models", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                if server.poll() is not None:
                    sys.exit(f"{name} ended with {server.returncode}")
                time.sleep(0.1)
        return asyncio.run(load(url, args))
    finally:
        server.terminate()
        server.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keel", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--only", choices=list(SERVERS), help="time one of them alone")
    for name, default in [("clients", 16), ("idle", 0), ("requests", 32), ("tokens", 64), ("words", 60), ("rounds", 2),
                          ("threads", os.cpu_count()), ("context", 2048)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    rows = []
    for _ in range(args.rounds):
        for name in commands(args, 0):
            rows.append((name, measure(name, args)))
            print(name, {k: round(v, 1) for k, v in rows[-1][1].items()}, file=sys.stderr, flush=True)
    print("| server | " + " | ".join(rows[0][1]) + " |\n|---|" + "---|" * len(rows[0][1]))
    for name in commands(args, 0):
        of = [row for n, row in rows if n == name]
        print(f"| {name} | " + " | ".join(f"{statistics.median(r[k] for r in of):,.1f}" for k in of[0]) + " |")


if __name__ == "__main__":
    main()
