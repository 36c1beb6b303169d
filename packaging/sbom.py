"""Lists what the binary is made of, in CycloneDX's JSON: sbom.py TARGET BINARY.

Every crate that is compiled into the program or runs while it is built, with version, licence, checksum and what it depends on,
as cargo resolves them for the target; and the built-in model. Crates for tests alone are left out.
"""

import hashlib
import json
import os
import subprocess
import sys
import tomllib
import uuid
from datetime import datetime, timezone
from pathlib import Path


def metadata(target):
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", target]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def reachable(graph, root):
    """Packages that the root needs, each with those that it needs itself."""
    nodes = {node["id"]: node for node in graph["resolve"]["nodes"]}
    found, waiting = {}, [root]
    while waiting:
        package = waiting.pop()
        if package in found:
            continue
        needs = [
            dependency["pkg"]
            for dependency in nodes[package]["deps"]
            if any(kind["kind"] in (None, "build") for kind in dependency["dep_kinds"])
        ]
        found[package] = sorted(needs)
        waiting.extend(needs)
    return found


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def reference(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package, checksums):
    found = {
        "type": "library",
        "bom-ref": reference(package),
        "name": package["name"],
        "version": package["version"],
        "purl": reference(package),
    }
    if package.get("license"):
        # Older manifests write a slash where the expression has OR.
        found["licenses"] = [{"expression": " OR ".join(part.strip() for part in package["license"].split("/"))}]
    checksum = checksums.get((package["name"], package["version"]))
    if checksum:
        found["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    return found


def main(target, binary):
    graph = metadata(target)
    packages = {package["id"]: package for package in graph["packages"]}
    root = next(package for package in graph["packages"] if package["name"] == "keel")
    needs = reachable(graph, root["id"])
    lock = tomllib.loads((Path(graph["workspace_root"]) / "Cargo.lock").read_text())
    checksums = {(p["name"], p["version"]): p.get("checksum") for p in lock["package"]}
    program = component(root, {}) | {
        "type": "application",
        "hashes": [{"alg": "SHA-256", "content": sha256(binary)}],
    }
    weights = Path(graph["workspace_root"]) / "models/demo/model.safetensors"
    model = {
        "type": "machine-learning-model",
        "bom-ref": "built-in-model",
        "name": "built-in/demo",
        "version": root["version"],
        "hashes": [{"alg": "SHA-256", "content": sha256(weights)}],
    }
    libraries = sorted((packages[id] for id in needs if id != root["id"]), key=reference)
    depends = [
        {"ref": reference(packages[id]), "dependsOn": sorted({reference(packages[need]) for need in found})}
        for id, found in sorted(needs.items(), key=lambda item: reference(packages[item[0]]))
    ]
    for entry in depends:
        if entry["ref"] == reference(root):
            entry["dependsOn"].append("built-in-model")
    when = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), timezone.utc)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, sha256(binary))}",
        "version": 1,
        "metadata": {"timestamp": when.strftime("%Y-%m-%dT%H:%M:%SZ"), "component": program},
        "components": [component(package, checksums) for package in libraries] + [model],
        "dependencies": depends,
    }
    json.dump(document, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
