#!/usr/bin/env python3
"""Attacks a server of its own on loopback, and checks that it holds. Needs Python 3.9 and Linux, nothing else.

    cargo build --release -p keel
    tools/drill/drill.py                       # 10,000 requests, 3,000 connections: some five minutes
    tools/drill/drill.py --short               # under a minute, with bounds that a busy machine keeps

The server that is attacked is started here and runs the built-in model. Nothing else is contacted. Every wait and every number is
bounded; the exit code is 0 if all held. A seed makes the order of requests the same each time.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time

HOST = "127.0.0.1"
MB = 1_000_000
BUDGET = 128 << 20
REST = 6  # longer than idle connections stay
ENVIRONMENT = {**os.environ, "KEEL_DEVICE": "cpu", "KEEL_CONFIG": "", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT.pop("KEEL_API_KEY", None)
WORDS = "The little dog ran over the hill and far away. "


class Server:
    """A `keel serve` of its own."""

    def __init__(self, keel, *more):
        command = [keel, "serve", "--port", "0", "--request-memory", str(BUDGET), "--head-timeout", "2", "--body-timeout", "3",
                   "--idle-timeout", "5", "--write-timeout", "5", "--grace", "3", "--max-tokens", "16", *more]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        self.lines = []
        self.port = None
        # A server that says nothing must not hold up the drill.
        deadline = threading.Timer(60, self.process.kill)
        deadline.start()
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"is served at http://127\.0\.0\.1:(\d+)", line)
            if found:
                self.port = int(found.group(1))
                break
        deadline.cancel()
        if self.port is None:
            sys.exit("the server did not start:\n" + "".join(self.lines))
        self.reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self.reader.start()
        wait_until("the server is ready", 60, lambda: self.ask("GET", "/health")[0] == 200)

    def connect(self, timeout=60.0):
        return socket.create_connection((HOST, self.port), timeout=timeout)

    def ask(self, method, path, body=None, headers=None, timeout=120.0):
        """Status and body of a request."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)
        try:
            data = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            reply = connection.getresponse()
            return reply.status, reply.read()
        except (OSError, http.client.HTTPException):
            # Large bodies are refused while they are sent.
            return 0, b""
        finally:
            connection.close()

    def metric(self, name):
        text = self.ask("GET", "/metrics")[1].decode()
        found = re.search("^" + re.escape(name) + r" (\S+)$", text, re.M)
        return float(found.group(1)) if found else None

    def resident(self):
        return resident(self.process.pid)["all"]

    def resident_at_rest(self):
        """Resident bytes after the server has given back what it keeps. It does so within a second after requests whose charges
        add up to 1 MB, and drops code, too. A request that comes later, such as one for its health, has it read 2 MB of
        code again. So both readings that are compared follow the same request, and no request comes in between."""
        assert self.ask("POST", "/tokenize", {"text": WORDS * 400})[0] == 200
        time.sleep(REST)
        return resident(self.process.pid)

    def renderers(self):
        """Processes that render chat templates. The server keeps one for each thread that needed one."""
        task = f"/proc/{self.process.pid}/task"
        lists = []
        for thread in os.listdir(task):
            with open(f"{task}/{thread}/children") as children:
                lists += children.read().split()
        return len(lists)

    def descriptors(self):
        """Open descriptors but the two pipes to each renderer."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd")) - 2 * self.renderers()

    def ledger(self, kind):
        """Bytes of the ledger by category."""
        text = self.ask("GET", "/metrics")[1].decode()
        return dict(re.findall(r'^keel_memory_bytes\{category="(\w+)",kind="' + kind + r'"\} (\S+)$', text, re.M))

    def is_idle(self):
        names = ["keel_requests_running", "keel_requests_waiting", 'keel_request_memory_bytes{kind="allocated"}']
        return all(self.metric(name) == 0 for name in names)


def wait_until(what, seconds, condition):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds} s until {what}")
        time.sleep(0.05)


class Watch:
    """Asks for the server's health and reads its memory, in a process of its own: the threads of this one wait for each other."""

    def __init__(self, server):
        command = [sys.executable, os.path.abspath(__file__), "--watch", str(server.port), str(server.process.pid)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.slowest, self.failures, self.most = 0.0, 0, {"all": 0}

    def end_of_phase(self):
        """Seconds of the slowest answer since the last call."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        seen = json.loads(self.process.stdout.readline())
        self.slowest, self.failures = max(self.slowest, seen["slowest"]), self.failures + seen["failures"]
        self.most = max(self.most, seen["most"], key=lambda memory: memory["all"])
        return seen["slowest"], seen["most"]

    def end(self):
        self.end_of_phase()
        self.process.stdin.close()
        self.process.wait(60)


def resident(pid):
    """Resident bytes: all, anonymous, and of files such as the program itself."""
    with open(f"/proc/{pid}/status") as status:
        text = status.read()
    return {name: int(re.search(field + r":\s+(\d+) kB", text).group(1)) * 1024
            for name, field in [("all", "VmRSS"), ("anonymous", "RssAnon"), ("files", "RssFile")]}


def watch(port, pid):
    """The process of `Watch`: asks 20 times a second, reads memory 100 times a second, and reports at each line of standard input."""
    lock, ends = threading.Lock(), threading.Event()
    fresh = {"slowest": 0.0, "failures": 0, "most": {"all": 0}}
    seen = dict(fresh)

    def ask():
        while not ends.is_set():
            start = time.monotonic()
            connection = http.client.HTTPConnection(HOST, port, timeout=30)
            try:
                connection.request("GET", "/health")
                held = connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                held = False
            finally:
                connection.close()
            took = time.monotonic() - start
            with lock:
                seen["slowest"], seen["failures"] = max(seen["slowest"], took), seen["failures"] + (not held)
            time.sleep(0.05)

    def read():
        while not ends.is_set():
            memory = resident(pid)
            with lock:
                seen["most"] = max(seen["most"], memory, key=lambda memory: memory["all"])
            time.sleep(0.01)

    for work in (ask, read):
        threading.Thread(target=work, daemon=True).start()
    for _ in sys.stdin:
        # At least one answer belongs to each phase.
        time.sleep(0.1)
        with lock:
            print(json.dumps(seen), flush=True)
            seen.update(fresh)
    ends.set()


def parallel(count, work):
    """Runs work(0) to work(count - 1) at once and returns what they returned."""
    results = [None] * count

    def one(i):
        results[i] = work(i)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    return results


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
    text = json.dumps({"text": WORDS * (8 * MB // len(WORDS))})
    statuses = parallel(8, lambda _: server.ask("POST", "/tokenize", text)[0])
    assert all(status in (0, 413, 503) for status in statuses), statuses
    values = '{"input": [' + ",".join(["{}"] * (7 * MB // 3)) + "]}"
    statuses = parallel(4, lambda _: server.ask("POST", "/v1/responses", values)[0])
    assert all(status in (0, 413, 503) for status in statuses), statuses


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
    assert all(status in (200, 400, 429) for status in statuses), statuses


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
    assert len(statuses) == 3 and all(status in (200, 400, 429) for status in statuses), statuses
    assert 200 in statuses, "no mask was ever computed"
    assert len(waited) == 3 and max(waited) < options.masks_s, f"two tokens took {waited} s next to slow masks"


def run_keel(server, *arguments, seconds=30, change=None):
    """Exit code (negative for a signal), standard error, seconds and peak bytes of a run. `change` is called while it runs."""
    keel = os.readlink(f"/proc/{server.process.pid}/exe")
    with tempfile.TemporaryFile(mode="w+") as said:
        start = time.monotonic()
        process = subprocess.Popen([keel, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, env=ENVIRONMENT)
        if change:
            change()
        pid, code, use = 0, 0, None
        while pid == 0:
            pid, code, use = os.wait4(process.pid, os.WNOHANG)
            if pid == 0 and time.monotonic() - start > seconds:
                process.kill()
                os.wait4(process.pid, 0)
                process.returncode = -9
                raise AssertionError(f"keel {' '.join(arguments)} still ran after {seconds} s")
            time.sleep(0.005)
        process.returncode = os.waitstatus_to_exitcode(code)
        said.seek(0)
        return process.returncode, said.read(), time.monotonic() - start, use.ru_maxrss * 1024


def refused(server, *arguments, seconds=30):
    """keel says why in one line, soon, and in little memory."""
    code, said, _, peak = run_keel(server, *arguments, seconds=seconds)
    assert code in (1, 2) and said.strip() and "panicked" not in said, f"keel {' '.join(arguments)}: code {code}: {said[-500:]}"
    assert peak < 500 * MB, f"keel {' '.join(arguments)}: {peak / MB:.0f} MB"
    return said


def wrong_settings(server, options):
    """Settings that aborted the server, or opened it to all."""
    key_file = ["--api-key-file", "/dev/null"]
    for arguments in [["--sequences", "0"], ["--swap", "18446744073709551615"], ["--request-memory", "1000"], ["--api-key", ""], key_file,
                      ["--key-per-minute", "5"]]:
        refused(server, "serve", "--port", "0", *arguments)


@contextlib.contextmanager
def another(server, *more):
    """A second server, which ends with the block."""
    other = Server(os.readlink(f"/proc/{server.process.pid}/exe"), *more)
    try:
        yield other
        other.process.send_signal(signal.SIGTERM)
        assert other.process.wait(timeout=20) == 0, "it did not end well"
        other.reader.join(10)  # the last lines are read
        assert not any("panicked" in line for line in other.lines), "it panicked"
    finally:
        if other.process.poll() is None:
            other.process.kill()
            other.process.wait(20)


def keys(server, options):
    """Keys, and the limits of each."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "keys")
        with open(path, "w") as file:
            file.write("rare rare-key-of-the-drill per-minute=3\nnarrow narrow-key-of-the-drill at-once=1\n")
        os.chmod(path, 0o600)
        with another(server, "--api-key-file", path) as other:
            def ask(key, tokens=1):
                headers = {"authorization": f"bEaReR {key}"} if key else {}
                return other.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": tokens, "ignore_eos": True}, headers)[0]

            assert [ask(None), ask("wrong"), ask("rare-key-of-the-dril")] == [401] * 3, "a wrong key was accepted"
            assert [ask("rare-key-of-the-drill") for _ in range(5)] == [200] * 3 + [429] * 2, "the rate of a key was not held"
            statuses = parallel(6, lambda _: ask("narrow-key-of-the-drill", 300))
            assert 200 in statuses and 429 in statuses and set(statuses) <= {200, 429}, statuses
            assert ask("narrow-key-of-the-drill") == 200, "the place of an ended request is not free"
            assert other.ask("GET", "/health")[0] == 200


TEMPLATES = {
    "doubled string": "{% set n = namespace(s='xxxxxxxx') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubled list": "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = (n.l + n.l)|list %}{% endfor %}",
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
}


def hostile_folders(server, options):
    """Model folders that somebody else made: pipes, endless files, templates and tokenizers that multiply text, cut weights."""
    demo = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../models/demo")
    with tempfile.TemporaryDirectory() as top:
        def folder(name):
            path = os.path.join(top, re.sub(r"\W", "_", name))
            shutil.copytree(demo, path)
            return path

        def replaced(name, make):
            path = folder(f"{name} {make.__name__}")
            os.remove(os.path.join(path, name))
            make(os.path.join(path, name))
            return path

        def endless(path):
            os.symlink("/dev/zero", path)

        folders = [replaced(name, make) for name in ["config.json", "model.safetensors", "tokenizer.json"] for make in [os.mkfifo, endless]]
        for name, template in TEMPLATES.items():
            folders.append(folder(name))
            with open(os.path.join(folders[-1], "chat_template.jinja"), "w") as file:
                file.write(template)
        folders.append(folder("a tokenizer that multiplies"))
        path = os.path.join(folders[-1], "tokenizer.json")
        with open(path) as file:
            tokenizer = json.load(file)
        step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 32}
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [step] * 12}
        with open(path, "w") as file:
            json.dump(tokenizer, file)
        folders.append(folder("cut weights"))
        os.truncate(os.path.join(folders[-1], "model.safetensors"), 1 << 20)
        for path in folders:
            refused(server, "generate", "a", "--model", path, "--max-tokens", "1", seconds=options.folder_s)
        # Weights that are cut while they are read: it may be done with them, or says what has happened. No signal ends it.
        for number in range(6):
            path = folder(f"weights cut while read {number}")
            weights = os.path.join(path, "model.safetensors")

            def cut():
                time.sleep(0.01 * number)
                os.truncate(weights, 1 << 20)

            code, said, _, _ = run_keel(server, "generate", "a", "--model", path, "--max-tokens", "1", change=cut)
            assert code in (0, 1) and "panicked" not in said, f"weights cut after {number * 10} ms: code {code}: {said[-500:]}"
        # A list that is a pipe is met at the start, and a prefix that is one when prefixes are saved.
        for pipe in ["index.json", "0.safetensors"]:
            prefixes = os.path.join(top, f"prefixes with {pipe}")
            os.mkdir(prefixes)
            os.mkfifo(os.path.join(prefixes, pipe))
            with another(server, "--prefix-cache-dir", prefixes) as other:
                assert other.ask("POST", "/v1/completions", {"prompt": WORDS * 20, "max_tokens": 1})[0] == 200
            assert any("not a regular file" in line for line in other.lines), f"{pipe} was never opened"
            assert stat.S_ISFIFO(os.lstat(os.path.join(prefixes, pipe)).st_mode), f"{pipe} was replaced"


def outputs(server, options):
    """`--out` onto what is not a file leaves it as it is, and follows links to files."""
    with tempfile.TemporaryDirectory() as top:
        def at(name):
            return os.path.join(top, name)

        os.mkfifo(at("pipe"))
        os.mkdir(at("folder"))
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as unix:
            unix.bind(at("socket"))
        targets = ["pipe", "folder", "socket"]
        try:
            # A device of its own: as root, a mistake would replace the system's.
            os.mknod(at("device"), 0o600 | stat.S_IFCHR, os.makedev(1, 7))
            targets.append("device")
        except OSError:
            print("outputs: no device could be made here, so none was played")
        for name in list(targets):
            os.symlink(at(name), at(f"link to {name}"))
            targets.append(f"link to {name}")
        before = {name: os.lstat(at(name)) for name in targets}
        for name in targets:
            refused(server, "logits", "--ids", "1,2,3", "--out", at(name))
        for name, seen in before.items():
            now = os.lstat(at(name))
            assert (now.st_mode, now.st_ino) == (seen.st_mode, seen.st_ino), f"{name} was replaced"
        with open(at("file"), "w") as file:
            file.write("old")
        os.symlink(at("file"), at("link to file"))
        code, said, _, _ = run_keel(server, "logits", "--ids", "1,2,3", "--out", at("link to file"))
        assert code == 0 and os.path.islink(at("link to file")) and os.path.getsize(at("file")) > 3, f"code {code}: {said[-500:]}"


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


def soak(server, options, count, seed):
    """Requests of every kind: 10% leave, 5% are malformed, 2% hostile."""
    problems, lock, left = [], threading.Lock(), [count]

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
                kind(server, rng)
            except (AssertionError, OSError) as problem:
                problems.append(f"{kind.__name__}: {problem}")

    parallel(12, client)
    assert not problems, problems[0]


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
    if sys.argv[1:2] == ["--watch"]:
        watch(int(sys.argv[2]), int(sys.argv[3]))
        return 0
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
