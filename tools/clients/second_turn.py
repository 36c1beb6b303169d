"""Time to the first token of the second turn of a long chat, compared with that of the first turn.

Every round is a chat of its own. `python second_turn.py [ROUNDS] [WORDS]`; needs httpx and a server that runs.
"""

import json
import os
import statistics
import sys
import time

import httpx

URL = os.environ.get("KEEL_URL", "http://127.0.0.1:8080")
rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
words = int(sys.argv[2]) if len(sys.argv) > 2 else 3950
client = httpx.Client(base_url=URL, timeout=None)
model = client.get("/v1/models").json()["data"][0]["id"]
WORDS = "the dog ran over a green hill and found one small red ball near an old tree".split()


def ask(messages: list) -> tuple[float, str, dict]:
    """Milliseconds to the first token, the text and the usage."""
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}
    began, first, text, usage = time.perf_counter(), None, "", {}
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            sys.exit(reply.read().decode())
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[len("data: "):])
                usage = event.get("usage") or usage
                piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
                if piece:
                    first, text = first or (time.perf_counter() - began) * 1e3, text + piece
    return first, text, usage


ratios = []
for i in range(rounds):
    story = " ".join(WORDS[(j * (i + 3) + j // 7) % len(WORDS)] for j in range(words))
    messages = [{"role": "user", "content": f"{i}. {story}"}]
    first, text, usage = ask(messages)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then? Tell me more of the dog."}]
    second, _, again = ask(messages)
    ratios.append(second / first)
    cached = again["prompt_tokens_details"]["cached_tokens"]
    print(f"{usage['prompt_tokens']} tokens: {first:.0f} ms; {again['prompt_tokens']} tokens, {cached} of them known: "
          f"{second:.1f} ms, {second / first:.1%}", flush=True)
print(f"median {statistics.median(ratios):.1%}")
