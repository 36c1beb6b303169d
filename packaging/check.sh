#!/usr/bin/env bash
# Checks a release as a stranger would find it: packaging/check.sh [FOLDER], after packaging/build.sh.
#
# Checksums; the archive's program in an empty root, with the system's C library and nothing else; the server and its page
# there; the wheel in a new environment; the unit, where systemd is there to judge it; the alert rules.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
folder=$(realpath "${1:-dist}")
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT

say() { printf '   %s\n' "$*"; }
fail() { echo "packaging/check.sh: $*" >&2; exit 1; }

(cd "$folder" && sha256sum --check --quiet SHA256SUMS)
say "the checksums are right"
for file in "$folder"/keel-*.tar.gz "$folder"/keel-*.cdx.json "$folder"/evenkeel-*.whl; do
    grep -q "  ${file##*/}\$" "$folder/SHA256SUMS" || fail "$file has no checksum: is it of another version?"
done

tar --extract --file "$folder"/keel-*.tar.gz --directory "$work" --strip-components=1
python3 - "$work/keel.cdx.json" "$work/keel" <<'PY'
import hashlib, json, sys
document = json.load(open(sys.argv[1]))
assert document["bomFormat"] == "CycloneDX" and len(document["components"]) > 50, "components are missing"
program = document["metadata"]["component"]
assert program["hashes"][0]["content"] == hashlib.sha256(open(sys.argv[2], "rb").read()).hexdigest(), "another binary"
known = {part["bom-ref"] for part in document["components"]} | {program["bom-ref"]}
assert len(known) == len(document["components"]) + 1, "a component is listed twice"
for entry in document["dependencies"]:
    assert set(entry["dependsOn"]) | {entry["ref"]} <= known, entry
nameless = [part["name"] for part in document["components"] if part["type"] == "library" and not part.get("licenses")]
assert not nameless, f"no licence: {nameless}"
PY
say "the list of components is complete"
python3 "$here/readme.py" check "$work"
python3 - "$folder"/evenkeel-*.whl <<'PY'
import re, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("/METADATA"))).decode()
dead = [target for target in re.findall(r"\]\(([^)]+)\)", metadata) if not target.startswith("http")]
assert not dead, f"the page of the wheel links to files: {dead}"
PY
say "the links of its documents lead somewhere"

# A root with the program, what the loader needs for it, and a place for temporary files.
root=$work/root
mkdir -p "$root/tmp" "$root/home"
install -m 755 "$work/keel" "$root/keel"
if libraries=$(ldd "$work/keel" 2>/dev/null); then
    echo "$libraries" | grep -o '/[^ ]*' | sort -u | while read -r library; do
        install -D -m 755 "$library" "$root$library"
    done
fi
keel=/keel
where="an empty root"
if [ "$(id -u)" = 0 ]; then
    alone=(env -i HOME=/home "$(command -v chroot)" "$root")
elif unshare --user --map-root-user true 2>/dev/null; then
    alone=(env -i HOME=/home "$(command -v unshare)" --user --map-root-user --root="$root")
else
    alone=(env -i -C "$root/home" HOME="$root/home")
    keel=$root/keel
    where="an empty folder"
fi
"${alone[@]}" "$keel" --version >/dev/null
text=$("${alone[@]}" "$keel" generate "Once upon a time" --max-tokens 16 --temperature 0 --quiet)
[ -n "$text" ] || fail "generate wrote nothing in $where"
"${alone[@]}" "$keel" plan >/dev/null
"${alone[@]}" "$keel" doctor >/dev/null
say "it plans and generates in $where"

"${alone[@]}" "$keel" serve --port 0 2>"$work/serve.log" &
server=$!
address=
for _ in $(seq 300); do
    address=$(sed -n 's|.*is served at http://||p' "$work/serve.log")
    [ -z "$address" ] || break
    kill -0 "$server" 2>/dev/null || fail "serve ended: $(cat "$work/serve.log")"
    sleep 0.1
done
[ -n "$address" ] || fail "serve said no address: $(cat "$work/serve.log")"
python3 - "$address" <<'PY'
import json, sys, urllib.request
address = f"http://{sys.argv[1]}"
page = urllib.request.urlopen(address + "/", timeout=30).read().decode()
assert "<html" in page, page[:200]
body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8}).encode()
request = urllib.request.Request(address + "/v1/completions", body, {"content-type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=60))
assert answer["choices"][0]["text"], answer
PY
kill "$server"
wait "$server" || fail "serve did not end well: $(cat "$work/serve.log")"
server=
say "it serves and shows its page in $where"

for page in keel keel-generate keel-serve; do
    [ -s "$work/man/$page.1" ] || fail "the manual has no $page.1"
done
bash -c "source '$work/completions/keel.bash' && complete -p keel" >/dev/null
say "manual and completions are there"

python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --no-index --no-deps "$folder"/evenkeel-*.whl
(cd "$root/home" && env -i HOME="$root/home" "$work/venv/bin/keel" generate "Once" --max-tokens 4 --quiet >/dev/null)
"$work/venv/bin/pip" uninstall --quiet --yes evenkeel
[ ! -e "$work/venv/bin/keel" ] || fail "the wheel leaves its program behind"
say "the wheel installs, runs and goes"

if command -v systemd-analyze >/dev/null; then
    # The unit names where the program is installed; here it is not.
    sed "s|/usr/local/bin/keel|$work/keel|" "$work/systemd/keel.service" >"$work/keel.service"
    systemd-analyze verify "$work/keel.service" 2>"$work/verify.log" || fail "the unit: $(cat "$work/verify.log")"
    say "the unit is sound"
fi
# The first three are for several machines. Without the last one wrong options start the server again for ever.
for line in "RestrictAddressFamilies=.*AF_NETLINK" "DeviceAllow=char-infiniband_verbs rw" "LimitMEMLOCK=infinity" \
    "RestartPreventExitStatus=2"; do
    grep -q "^$line$" "$work/systemd/keel.service" || fail "the unit has no $line"
done

# Prometheus drops a file of rules with one expression that it cannot read. A matching clause is between two vectors, so
# no number is before its operator.
! grep -nE '(^|[^a-z0-9_.])[0-9.]+ *([-+*/%^<>]|[=!<>]=) *(bool *)?(on|ignoring) *\(' "$here"/grafana/alerts.yml ||
    fail "the rules match a number with a vector"
if command -v promtool >/dev/null; then
    promtool check rules "$here"/grafana/alerts.yml >"$work/rules.log" 2>&1 ||
        fail "the rules: $(cat "$work/rules.log")"
fi
say "the alert rules are sound"
grep -q "sha256 \"$(sha256sum "$folder"/keel-*.tar.gz | cut -d' ' -f1)\"" "$folder/keel.rb" || fail "the formula names another archive"
say "the formula names the archive"
