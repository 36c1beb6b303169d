"""Writes the book's reference pages from the program itself.

    reference.py KEEL FOLDER

KEEL is the binary. FOLDER gets commands.md, from the help of every command, and http.md, from /openapi.json of a server that is
started for it on a free port.
"""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

METHODS = ("get", "post", "delete")


def help_of(keel, command):
    result = subprocess.run([keel, *command, "--help"], capture_output=True, text=True, check=True, env={"KEEL_CONFIG": ""})
    return result.stdout


def subcommands(text):
    listed = re.search(r"^Commands:\n((?:  .*\n|\n)+)", text, re.MULTILINE)
    names = re.findall(r"^  ([a-z][a-z-]*) ", listed[1], re.MULTILINE) if listed else []
    return [name for name in names if name != "help"]


def commands(keel, command=()):
    text = help_of(keel, command)
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    title = " ".join(("keel", *command))
    yield f"## {title}\n\n```text\n" + "\n".join(lines) + "\n```\n"
    for name in subcommands(text):
        yield from commands(keel, (*command, name))


def openapi(keel):
    server = subprocess.Popen(
        [keel, "serve", "--port", "0", "--device", "cpu", "--context", "256", "--sequences", "1", "--log-format", "json"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={"KEEL_CONFIG": ""},
    )
    try:
        said = []
        for line in server.stderr:
            said.append(line)
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found:
                with urllib.request.urlopen(found[0] + "/openapi.json", timeout=60) as answer:
                    return json.load(answer)
        raise SystemExit("the server did not say where it listens: " + "".join(said))
    finally:
        server.kill()
        server.wait()


def resolve(document, schema):
    reference = schema.get("$ref")
    return document["components"]["schemas"][reference.rsplit("/", 1)[1]] if reference else schema


def type_of(schema):
    if "$ref" in schema:
        return schema["$ref"].rsplit("/", 1)[1]
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "oneOf" in schema or "anyOf" in schema:
        parts = [type_of(part) for part in schema.get("oneOf", schema.get("anyOf"))]
        return " or ".join(dict.fromkeys(part for part in parts if part))
    kinds = schema.get("type", "any")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    shown = [f"list of {type_of(schema['items'])}" if kind == "array" and "items" in schema else kind for kind in kinds]
    return " or ".join(kind for kind in shown if kind != "null")


def bounds_of(schema):
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{low} to {high}"
    return f"at least {low}" if low is not None else f"at most {high}" if high is not None else ""


def fields(schema):
    required = schema.get("required", [])
    yield "| field | type | |\n|---|---|---|"
    for name, value in schema.get("properties", {}).items():
        notes = ["required"] if name in required else []
        notes += [text for text in (bounds_of(value), value.get("description", "")) if text]
        yield f"| `{name}` | {type_of(value)} | {'; '.join(notes)} |"


def http(document):
    yield "# HTTP API\n"
    yield "Made from `/openapi.json` of the server. Errors are JSON in the form of the API that was called.\n"
    statuses = {}
    for path, methods in document["paths"].items():
        for method in METHODS:
            if method not in methods:
                continue
            about = methods[method]
            statuses |= {code: text["description"] for code, text in about["responses"].items()}
            yield f"## {method.upper()} {path}\n\n{about['summary']}.\n"
            for media, body in about.get("requestBody", {}).get("content", {}).items():
                yield f"Body: `{media}`.\n"
                yield "\n".join(fields(resolve(document, body["schema"]))) + "\n"
    yield "## Statuses\n\n| status | meaning |\n|---|---|"
    yield "\n".join(f"| {code} | {text} |" for code, text in sorted(statuses.items()))


def main():
    keel, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    pages = ["# Commands\n", "Made from the program's own help (`keel COMMAND --help`).\n", *commands(keel)]
    (folder / "commands.md").write_text("\n".join(pages))
    (folder / "http.md").write_text("\n".join(http(openapi(keel))) + "\n")


main()
