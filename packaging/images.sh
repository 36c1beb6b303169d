#!/usr/bin/env bash
# Builds the images of packaging/Dockerfile and looks at each as a user would:
#
#   packaging/images.sh [docker|podman|buildah] [OPTIONS of the build]      (buildah: with BUILDAH_ISOLATION=chroot)
#
# Version, a text, the user, a folder for models that can be written, and a server that answers, shows its page and ends at SIGTERM;
# in the image for CUDA, NVRTC is found. No GPU is needed. Where no registry can be reached, base images that are there under
# their names do:
#
#   BUILDAH_ISOLATION=chroot packaging/images.sh buildah --pull-never
set -euo pipefail
cd "$(dirname "$0")/.."
tool=${1:-docker}
shift || true
work=$(mktemp -d)
server= container=
end() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    [ -z "$container" ] || buildah rm "$container" >/dev/null || true
    rm -rf "$work"
}
trap end EXIT

say() { printf '   %s\n' "$*"; }
fail() { echo "packaging/images.sh: $*" >&2; exit 1; }

build=("$tool" build -f packaging/Dockerfile)
case $tool in
    docker) ;;
    podman) build+=(--ignorefile packaging/Dockerfile.dockerignore) ;;
    buildah)
        build+=(--ignorefile packaging/Dockerfile.dockerignore)
        # The server is ended by its own process number, which is that of this machine with chroot alone.
        [ "${BUILDAH_ISOLATION:-}" = chroot ] || fail "buildah needs BUILDAH_ISOLATION=chroot"
        ;;
    *) fail "there is no builder $tool: docker, podman or buildah" ;;
esac

# Sets `inside`: what runs a command in the image `$1`.
enter() {
    if [ "$tool" = buildah ]; then
        [ -z "$container" ] || buildah rm "$container" >/dev/null
        container=$(buildah from --pull-never "$1")
        inside=(buildah run --network host "$container" --)
    else
        inside=("$tool" run --rm --network host --entrypoint /usr/bin/env "$1")
    fi
}

# A server in the image, asked from outside.
serve() {
    "${inside[@]}" sh -c 'echo "process $$" >&2; exec keel serve --port 0' 2>"$work/log" &
    server=$!
    local address=
    for _ in $(seq 600); do
        address=$(sed -n 's|.*is served at http://||p' "$work/log")
        [ -z "$address" ] || break
        kill -0 "$server" 2>/dev/null || fail "serve ended: $(cat "$work/log")"
        sleep 0.1
    done
    [ -n "$address" ] || fail "serve said no address: $(cat "$work/log")"
    python3 - "$address" <<'PY'
import json, sys, urllib.request
address = f"http://{sys.argv[1]}"
assert "<html" in urllib.request.urlopen(address + "/", timeout=30).read().decode()
body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8}).encode()
request = urllib.request.Request(address + "/v1/completions", body, {"content-type": "application/json"})
answer = json.load(urllib.request.urlopen(request, timeout=60))
assert answer["choices"][0]["text"], answer
PY
    if [ "$tool" = buildah ]; then
        # buildah does not pass signals on.
        kill "$(sed -n 's/^process //p' "$work/log")"
    else
        kill "$server"
    fi
    wait "$server" || fail "serve did not end well: $(cat "$work/log")"
    server=
}

for target in cpu cuda; do
    image=keel:$target
    "${build[@]}" "$@" --target "$target" -t "$image" . >"$work/build.log" 2>&1 ||
        fail "the target $target is not built: $(tail -n 20 "$work/build.log")"
    enter "$image"
    "${inside[@]}" keel --version >/dev/null
    text=$("${inside[@]}" keel generate "Once upon a time" --max-tokens 16 --temperature 0 --quiet)
    [ -n "$text" ] || fail "$image: generate wrote nothing"
    user=$("${inside[@]}" id -u)
    [ "$user" = 10001 ] || fail "$image runs as $user"
    "${inside[@]}" sh -c 'touch "$KEEL_CACHE_DIR/mark" && rm "$KEEL_CACHE_DIR/mark"' || fail "$image: nothing can be downloaded"
    doctor=$("${inside[@]}" keel doctor)
    if [ "$target" = cuda ] && echo "$doctor" | grep -q "^NVRTC *none"; then
        fail "$image has no NVRTC: $doctor"
    fi
    serve
    say "$image generates and serves"
done
