#!/usr/bin/env python3
"""Checks the licence and the source of every crate that the workspace depends on, by the lists in deny.toml.

cargo-deny does more (advisories above all), but takes longer to build than everything else in .ci/run. This needs
`cargo metadata` and Python alone:

    tools/licences.py
"""
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def allowed_licences():
    """The strings of `allow = [...]` in the section [licenses] of deny.toml."""
    section = (ROOT / "deny.toml").read_text().split("[licenses]")[1].split("\n[")[0]
    return set(re.findall(r'"([^"]+)"', section.split("allow = [")[1].split("]")[0]))


def is_allowed(expression, allowed):
    """Whether an SPDX expression can be satisfied; `/` is the old way to write OR."""
    tokens = re.findall(r"\(|\)|[^\s()]+", expression.replace("/", " OR "))

    def any_of(at):
        value, at = all_of(at)
        while at < len(tokens) and tokens[at] == "OR":
            other, at = all_of(at + 1)
            value = value or other
        return value, at

    def all_of(at):
        value, at = one(at)
        while at < len(tokens) and tokens[at] == "AND":
            other, at = one(at + 1)
            value = value and other
        return value, at

    def one(at):
        if tokens[at] == "(":
            value, at = any_of(at + 1)
            return value, at + 1
        name, at = tokens[at], at + 1
        if at < len(tokens) and tokens[at] == "WITH":
            name, at = f"{name} WITH {tokens[at + 1]}", at + 2
        return name in allowed, at

    value, end = any_of(0)
    return value and end == len(tokens)


def main():
    command = ["cargo", "metadata", "--format-version", "1", "--all-features", "--locked"]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    allowed, wrong, count = allowed_licences(), [], 0
    for package in metadata["packages"]:
        name = f"{package['name']} {package['version']}"
        source, licence = package["source"], package["license"]
        count += 1
        if source is not None and not source.startswith("registry+"):
            wrong.append(f"{name}: from {source}, not from the registry")
        if licence is None and package["license_file"] is None:
            wrong.append(f"{name}: names no licence")
        elif licence is not None and not is_allowed(licence, allowed):
            wrong.append(f"{name}: licence {licence!r} is not among those of deny.toml")
    print("\n".join(wrong) or f"{count} packages: every licence is allowed, every source is the registry")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
