"""A server that is started for the drill, and what is read from outside about it."""

import http.client
import json
import os
import re
import socket
import subprocess
import sys
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
        """Status and body of a request. Status 0: the connection was closed. Status -1: there was no answer in time."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)
        try:
            data = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
            reply = connection.getresponse()
            return reply.status, reply.read()
        except socket.timeout:
            return -1, b""
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


def resident(pid):
    """Resident bytes: all, anonymous, and of files such as the program itself."""
    with open(f"/proc/{pid}/status") as status:
        text = status.read()
    return {name: int(re.search(field + r":\s+(\d+) kB", text).group(1)) * 1024
            for name, field in [("all", "VmRSS"), ("anonymous", "RssAnon"), ("files", "RssFile")]}


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
