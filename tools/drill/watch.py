"""Asks for a server's health and reads its memory, in a process of its own."""

import http.client
import json
import os
import subprocess
import sys
import threading
import time

from server import HOST, resident


class Watch:
    """Asks for the server's health and reads its memory, in a process of its own: the threads of this one wait for each other."""

    def __init__(self, server):
        command = [sys.executable, os.path.abspath(__file__), str(server.port), str(server.process.pid)]
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


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]))
