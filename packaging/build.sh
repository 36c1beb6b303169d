#!/usr/bin/env bash
# Makes everything that a release consists of, from one binary:
#
#   packaging/build.sh [--binary FILE] [--url URL] [FOLDER]
#
# FOLDER (dist) then holds the archive, the list of what the binary is made of (SBOM), the Homebrew formula, the wheel and
# SHA256SUMS. All other archives, lists and wheels, also those of another target, are removed from it, with a line on
# standard error for each. Without --binary the release is built first. URL is where the archive will be downloaded from;
# by default the formula points at FOLDER. Two runs on the same commit and binary make the same bytes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/.." && pwd)

binary= url= folder=
while [ $# -gt 0 ]; do
    case $1 in
        --binary) binary=$(realpath "$2"); shift 2 ;;
        --url) url=${2%/}; shift 2 ;;
        -*) echo "packaging/build.sh: there is no option $1" >&2; exit 2 ;;
        *) folder=$1; shift ;;
    esac
done
folder=${folder:-dist}
mkdir -p "$folder"
folder=$(realpath "$folder")
cd "$repo"

if [ -z "$binary" ]; then
    cargo build --release --locked -p keel
    binary=$repo/target/release/keel
fi
version=$("$binary" --version | cut -d' ' -f2)
target=$(rustc -vV | sed -n 's/^host: //p')
name=keel-$version-$target
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
stage=$work/$name
mkdir -p "$stage/completions" "$stage/systemd"
install -m 755 "$binary" "$stage/keel"
install -m 644 LICENSE-MIT LICENSE-APACHE "$stage"
python3 "$here/readme.py" stage "$stage"
install -m 644 models/demo/README.md "$stage/BUILT-IN-MODEL.md"
install -m 644 packaging/keel.service "$stage/systemd"
"$binary" man "$stage/man"
"$binary" completions bash >"$stage/completions/keel.bash"
"$binary" completions zsh >"$stage/completions/_keel"
"$binary" completions fish >"$stage/completions/keel.fish"
python3 "$here/sbom.py" "$target" "$binary" >"$stage/keel.cdx.json"

# FOLDER is one release for one target: another file would have no checksum, and check.sh would not know which to try.
for old in "$folder"/keel-[0-9]*.tar.gz "$folder"/keel-[0-9]*.cdx.json "$folder"/evenkeel-[0-9]*.whl; do
    [ -e "$old" ] || continue
    echo "packaging/build.sh: removing $old" >&2
    rm "$old"
done
rm -f "$folder/SHA256SUMS"
archive=$folder/$name.tar.gz
tar --create --directory "$work" --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
    --mtime="@$SOURCE_DATE_EPOCH" "$name" | gzip --no-name >"$archive"
cp "$stage/keel.cdx.json" "$folder/$name.cdx.json"
python3 "$here/formula.py" "$archive" "$version" "${url:-file://$folder}" >"$folder/keel.rb"
wheel=$(python3 "$here/wheel.py" "$binary" "$version" "$folder")
(cd "$folder" && sha256sum "$name.tar.gz" "$name.cdx.json" keel.rb "$wheel" >SHA256SUMS)
cat "$folder/SHA256SUMS"
