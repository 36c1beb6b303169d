#!/usr/bin/env bash
# Builds the book: docs/guide/build.sh [--binary FILE] [FOLDER]
#
# FOLDER (target/guide) then holds the pages; open index.html. The reference pages come from the binary (target/release/keel).
# mdBook is installed into .cache if it is not there. Every link between pages is checked, and every command of the book and of the
# README against the help of the binary.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)
version=0.5.4

binary=$repo/target/release/keel folder=$repo/target/guide
while [ $# -gt 0 ]; do
    case $1 in
        --binary) binary=$(realpath "$2"); shift 2 ;;
        -*) echo "docs/guide/build.sh: there is no option $1" >&2; exit 2 ;;
        *) folder=$(realpath -m "$1"); shift ;;
    esac
done

mdbook=$repo/.cache/mdbook/bin/mdbook
if [ "$("$mdbook" --version 2>/dev/null || true)" != "mdbook v$version" ]; then
    # Without optimisation: it runs for a second, and is built for minutes.
    cargo install mdbook --version "$version" --locked --debug --no-default-features --features search \
        --root "$repo/.cache/mdbook"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$here/book.toml" "$here/src" "$work"
python3 "$here/reference.py" "$binary" "$work/src/reference"
rm -rf "$folder"
"$mdbook" build "$work" --dest-dir "$folder"
python3 "$here/links.py" "$folder"
python3 "$here/examples.py" "$binary" "$here"/src/*.md "$repo/README.md"
