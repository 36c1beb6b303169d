#!/usr/bin/env bash
# CPU seconds of a cold release build, all crates together and the dearest ones: tools/build_time.sh [FOLDER]
#
# Builds into FOLDER (by default a temporary one), which must be empty, so that nothing is reused. CPU time, unlike the clock, does
# not depend on how many cores there are; it still grows where other work shares them.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-$(mktemp -d)}
[ -z "$(ls -A "$folder" 2>/dev/null)" ] || { echo "$folder is not empty" >&2; exit 1; }
mkdir -p "$folder"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cat >"$work/rustc" <<'WRAPPER'
#!/usr/bin/env bash
# Called with the compiler and its arguments.
crate=other
for ((i = 1; i < $#; i++)); do
    [ "${!i}" = --crate-name ] && { next=$((i + 1)); crate=${!next}; }
done
TIMEFORMAT="%U %S $crate"
{ time "$@" 2>&3; } 3>&2 2>>"$TIMES"
WRAPPER
chmod +x "$work/rustc"
export RUSTC_WRAPPER=$work/rustc TIMES=$work/times
TIMEFORMAT="all: %U s of CPU, %R s by the clock"
time cargo build --release --locked -p keel --target-dir "$folder"
echo "dearest crates, seconds of CPU:"
awk '{ seconds[$3] += $1 + $2 } END { for (crate in seconds) printf "%8.1f  %s\n", seconds[crate], crate }' "$work/times" |
    sort -rn | head -25
ls -l "$folder/release/keel" | awk '{ printf "binary: %.1f MB\n", $5 / 1e6 }'
