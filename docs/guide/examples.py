"""Checks the book's commands against the program: examples.py KEEL FILE...

Every line of a shell block that runs keel must name a command that exists, with options that its help knows.
"""

import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import chain
from pathlib import Path

KEEL = sys.argv[1]


@cache
def options_of(command):
    result = subprocess.run([KEEL, *command, "--help"], capture_output=True, text=True, env={"KEEL_CONFIG": ""})
    if result.returncode != 0:
        return None
    return set(re.findall(r"(?<![\w-])(--[a-z][a-z-]*|-[A-Za-z])\b", result.stdout))


def runs_of_keel(line):
    if not re.search(r"\bkeel\b", line):
        return
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    run = []
    for word in chain(words, ";"):
        if set(word) & set("<>"):
            next(words, None)
        elif re.fullmatch("[|;&()]+", word):
            if run and Path(run[0]).name == "keel":
                yield run[1:]
            run = []
        else:
            run.append(word)


def wrong_in(words):
    command = (words[0],)
    if options_of(command) is None:
        return f"there is no command {words[0]}"
    if len(words) > 1 and re.fullmatch("[a-z]+", words[1]) and options_of((words[0], words[1])) and words[0] == "bench":
        command = (words[0], words[1])
    unknown = [w for w in words if re.match(r"--?[A-Za-z]", w) and w.split("=")[0] not in options_of(command)]
    return f"keel {' '.join(command)} has no {', '.join(unknown)}" if unknown else None


def main():
    count, wrong = 0, []
    for file in sys.argv[2:]:
        for block in re.findall(r"^```sh\n(.*?)^```", Path(file).read_text(), re.MULTILINE | re.DOTALL):
            for words in (words for line in block.splitlines() for words in runs_of_keel(line)):
                count += 1
                reason = wrong_in(words)
                wrong += [f"{file}: {reason}"] if reason else []
    if wrong or count == 0:
        raise SystemExit("commands that do not run:\n" + "\n".join(wrong))
    print(f"{count} commands")


main()
