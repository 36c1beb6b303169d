"""Attacks by requests. Each takes the server and the options of the drill."""

import json
import random
import threading
import time

from server import MB, WORDS, parallel

ANSWERED = 0.95  # the part of a soak's ordinary requests that must be answered, not only refused


def strangers(server, _):
    """Requests of web pages of other sites."""
    body = {"prompt": "Once", "max_tokens": 1}
    for headers, expected in [({"host": "attacker.com"}, 403), ({"origin": "https://attacker.com"}, 403), ({"origin": "null"}, 403),
                              ({"content-type": "text/plain"}, 415), ({}, 200)]:
        status, _ = server.ask("POST", "/v1/completions", body, headers)
        assert status == expected, f"{headers}: {status}, expected {expected}"
    for path in ["/../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd"]:
        assert server.ask("GET", path)[0] == 404, path


def half_open(server, options):
    """Connections that say nothing, or half of something."""
    said = [b"", b"GET /hea", b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 1000\r\n\r\n{", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"]
    open_ones = []
    for i in range(options.connections):
        connection = server.connect()
        try:
            connection.sendall(said[i % 4])
        except OSError:
            pass
        open_ones.append(connection)
    assert server.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 1})[0] == 200
    time.sleep(7)
    left = server.descriptors()
    for connection in open_ones:
        connection.close()
    assert left < 100, f"{left} descriptors are open after all times have passed"


def large_texts(server, options):
    """Bodies whose text or values need more memory than all requests together have."""
    text = json.dumps({"text": WORDS * (8 * MB // len(WORDS))})
    values = '{"input": [' + ",".join(["{}"] * (7 * MB // 3)) + "]}"
    for count, path, body in [(8, "/tokenize", text), (4, "/v1/responses", values)]:
        statuses = parallel(count, lambda _: server.ask("POST", path, body)[0])
        assert all(status in (0, 413, 503) for status in statuses), statuses
        # 0 is a connection that was closed while the body was sent. If all are, the reason is unknown.
        assert 413 in statuses, f"{path}: {statuses}: none is refused for the memory that it needs"


def unfinished_bodies(server, options):
    head = (f"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {8 * MB}\r\n\r\n").encode()
    open_ones = []
    for _ in range(100):
        connection = server.connect(timeout=0.2)
        try:
            connection.sendall(head + b" " * (2 * MB))
        except OSError:
            pass
        open_ones.append(connection)
    assert server.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 1})[0] == 200
    for connection in open_ones:
        connection.close()


def abandoned_prompts(server, options):
    body = json.dumps({"prompt": "a1 b2 " * (8 * MB // 6), "max_tokens": 1}).encode()
    head = (f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n").encode()
    for _ in range(8):
        connection = server.connect(timeout=5)
        try:
            connection.sendall(head + body)
        except OSError:
            pass
        connection.close()
    start = time.monotonic()
    assert server.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 1})[0] == 200
    took = time.monotonic() - start
    assert took < 4, f"one token took {took:.1f} s after abandoned prompts"


def grammars(server, options):
    properties = {f"property_{i}": {"type": "string", "pattern": f"^[a-z]{{1,{9 + i % 11}}}(x|y{i}|z)*[0-9]{{1,5}}$"} for i in range(500)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    body = {"prompt": "x", "max_tokens": 4, "n": 8, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    statuses = parallel(4, lambda _: server.ask("POST", "/v1/completions", body)[0])
    assert all(status in (200, 400, 413, 429, 503) for status in statuses), statuses
    assert 200 in statuses, f"{statuses}: no grammar was ever compiled"


def slow_masks(server, options):
    """Masks of a grammar whose every token has many ways to go on. Other requests are answered meanwhile."""
    lark = "start: (" + "|".join(f"w{i}" for i in range(40)) + ")+\n"
    lark += "".join(f"w{i}: /[a-z ]{{0,{20 + i}}}[aeiou]{{1,{9 + i % 7}}}/ (w{(i + 1) % 40} | w{(i * 7 + 3) % 40})?\n" for i in range(40))
    body = {"prompt": "x", "max_tokens": 64, "n": 4, "temperature": 2, "response_format": {"type": "grammar", "grammar": lark}}
    statuses, waited = [], []

    def one(number):
        if number < 3:
            statuses.append(server.ask("POST", "/v1/completions", body)[0])
            return
        time.sleep(0.1)
        start = time.monotonic()
        assert server.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 2})[0] == 200
        waited.append(time.monotonic() - start)

    parallel(6, one)
    assert len(statuses) == 3 and all(status in (200, 400, 413, 429, 503) for status in statuses), statuses
    assert 200 in statuses, "no mask was ever computed"
    assert len(waited) == 3 and max(waited) < options.masks_s, f"two tokens took {waited} s next to slow masks"


def malformed(server, rng):
    bodies = [b"{", b"\xff\xfe", b"[1", b"[" * 5000, b'{"prompt": {"not": 1}}', b'{"prompt": "a", "max_tokens": -1}', b""]
    status, _ = server.ask("POST", rng.choice(["/v1/completions", "/v1/chat/completions", "/v1/messages"]), rng.choice(bodies))
    assert status in (400, 422), status


def hostile(server, rng):
    kind = rng.randrange(3)
    if kind == 0:
        status, _ = server.ask("POST", "/v1/completions", {"prompt": "a" * MB, "max_tokens": 1})
        assert status in (0, 400, 413, 503), status
    elif kind == 1:
        assert server.ask("GET", "/status", headers={"host": "attacker.com"})[0] == 403
    else:
        connection = server.connect()
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999999999999\r\n\r\n")
        connection.close()


def leaver(server, rng):
    body = json.dumps({"prompt": "Once", "max_tokens": 600, "ignore_eos": True, "stream": rng.random() < 0.5}).encode()
    connection = server.connect()
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    time.sleep(rng.random() * 0.05)
    connection.close()


def ordinary(server, rng):
    if rng.random() < 0.3:
        body = {"messages": [{"role": "system", "content": "You tell stories."}, {"role": "user", "content": f"Story {rng.randrange(50)}"}],
                "max_tokens": 8, "stream": rng.random() < 0.5}
        status, _ = server.ask("POST", "/v1/chat/completions", body)
    else:
        prompt = [rng.randrange(4000) for _ in range(1 + rng.randrange(200))]
        status, _ = server.ask("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1 + rng.randrange(12), "seed": 1})
    assert status in (200, 429), status
    return status


def soak(server, options, count, seed):
    """Requests of every kind: 10% leave, 5% are malformed, 2% hostile."""
    problems, lock, left, statuses = [], threading.Lock(), [count], []

    def client(number):
        rng = random.Random(seed * 1000 + number)
        while True:
            with lock:
                if left[0] == 0 or problems:
                    return
                left[0] -= 1
            draw = rng.random()
            kind = leaver if draw < 0.10 else malformed if draw < 0.15 else hostile if draw < 0.17 else ordinary
            try:
                status = kind(server, rng)
                if kind is ordinary:
                    statuses.append(status)
            except (AssertionError, OSError) as problem:
                problems.append(f"{kind.__name__}: {problem}")

    parallel(12, client)
    assert not problems, problems[0]
    answered = statuses.count(200)
    # 12 clients do not fill the queue, so a request is hardly ever refused for it.
    assert answered >= ANSWERED * len(statuses) > 0, f"only {answered} of {len(statuses)} ordinary requests were answered"
