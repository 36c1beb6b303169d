"""Packs the binary as a wheel, so that pip installs it: wheel.py BINARY VERSION FOLDER. Prints the wheel's name.

A wheel is a zip archive. What lies under NAME.data/scripts comes into the environment's bin as it is.
"""

import base64
import hashlib
import os
import re
import stat
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import readme

NAME = "evenkeel"
REPO = Path(__file__).resolve().parent.parent
METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: Runs and serves hybrid language models, with memory known before the start: the program keel
License-Expression: MIT OR Apache-2.0
License-File: LICENSE-MIT
License-File: LICENSE-APACHE
Requires-Python: >=3.8
Description-Content-Type: text/markdown

{readme}"""
WHEEL = """\
Wheel-Version: 1.0
Generator: packaging/wheel.py
Root-Is-Purelib: false
Tag: py3-none-{platform}
"""


def platform_of(binary):
    """The platform's tag: on Linux with the newest version of the C library that the binary asks for."""
    system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if not system.startswith("linux_"):
        return system
    versions = [tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", binary)]
    if not versions:
        return system
    major, minor = max(versions)
    return f"manylinux_{major}_{minor}_{system.removeprefix('linux_')}"


def record_line(path, data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(data)}\n"


def main(binary, version, folder):
    program = Path(binary).read_bytes()
    platform = platform_of(program)
    info = f"{NAME}-{version}.dist-info"
    metadata = METADATA.format(name=NAME, version=version, readme=readme.plain())
    files = {
        f"{NAME}-{version}.data/scripts/keel": program,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": WHEEL.format(platform=platform).encode(),
        f"{info}/licenses/LICENSE-MIT": (REPO / "LICENSE-MIT").read_bytes(),
        f"{info}/licenses/LICENSE-APACHE": (REPO / "LICENSE-APACHE").read_bytes(),
    }
    record = "".join(record_line(path, data) for path, data in files.items())
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    # A zip archive knows no time before 1980.
    when = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), 315532800))[:6]
    name = f"{NAME}-{version}-py3-none-{platform}.whl"
    with zipfile.ZipFile(Path(folder) / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, when)
            mode = 0o755 if path.endswith("scripts/keel") else 0o644
            entry.external_attr = (stat.S_IFREG | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    print(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
