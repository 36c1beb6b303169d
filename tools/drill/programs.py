"""Attacks by settings, keys, folders and outputs, on runs of keel and on further servers."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time

from server import ENVIRONMENT, MB, WORDS, Server, parallel


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
