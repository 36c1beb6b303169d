#!/usr/bin/env bash
# Runs every client of Python, Node and Rust against a server of its own with the built-in model. Needs python3 with venv, npm, cargo and
# what they fetch. What is missing is named, and the script then fails after all that could run.
#
#   cargo build --release -p keel && tools/clients/run.sh [PROGRAM]
set -euo pipefail
cd "$(dirname "$0")"
keel=$(realpath "${1:-../../target/release/keel}")
folder=$(mktemp -d)
server=
missing=
end() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    rm -rf "$folder"
}
trap end EXIT

# Two environments: litellm refuses the latest major version of openai.
python3 -m venv "$folder/python"
"$folder/python/bin/pip" install --quiet --disable-pip-version-check openai==2.54.0 anthropic==2.12.0 langchain-openai==1.7.3 \
    litellm==1.106.2 mcp==2.3.0 schemathesis==4.32.5
python3 -m venv "$folder/latest"
"$folder/latest/bin/pip" install --quiet --disable-pip-version-check openai==3.54.0

# A free port, and no settings of this user. Answers are short where a request sets no length: a busy machine shall write them within the
# clients' patience.
env -u KEEL_API_KEY KEEL_CONFIG=/dev/null KEEL_DEVICE=cpu "$keel" serve --port 0 --max-tokens 256 2>"$folder/log" &
server=$!
KEEL_URL=
for _ in $(seq 600); do
    KEEL_URL=$(sed -n 's/.*is served at //p' "$folder/log")
    [ -z "$KEEL_URL" ] || break
    kill -0 "$server" 2>/dev/null || break
    sleep 0.1
done
if [ -z "$KEEL_URL" ]; then
    echo "keel serve did not start:" >&2
    cat "$folder/log" >&2
    exit 1
fi
export KEEL_URL PATH="$folder/python/bin:$PATH"
unset KEEL_API_KEY
# litellm would ask its own site for a list of prices.
export LITELLM_LOCAL_MODEL_COST_MAP=True

for client in openai anthropic langchain litellm; do
    python "${client}_client.py"
done
"$folder/latest/bin/python" openai_client.py
./schemathesis.sh 50
if command -v npm >/dev/null; then
    cp ai_sdk/package.json ai_sdk/client.mjs "$folder"
    (cd "$folder" && npm install --silent --no-audit --no-fund && node client.mjs)
else
    missing="$missing npm"
fi
if command -v cargo >/dev/null; then
    cargo run --quiet --locked --manifest-path async_openai/Cargo.toml
else
    missing="$missing cargo"
fi
if [ -n "$missing" ]; then
    echo "these are missing, so their clients did not run:$missing" >&2
    exit 1
fi
echo "all clients work"
