#!/usr/bin/env bash
# Runs every client of Python and Node against a server of its own with the built-in model. Needs pip, npm and what they fetch.
#
#   cargo build --release -p keel && tools/clients/run.sh [PROGRAM]
set -euo pipefail
cd "$(dirname "$0")"
keel=$(realpath "${1:-../../target/release/keel}")
folder=$(mktemp -d)
server=
end() {
    [ -z "$server" ] || kill "$server" 2>/dev/null || true
    rm -rf "$folder"
}
trap end EXIT

python3 -m venv "$folder/python"
"$folder/python/bin/pip" install --quiet openai==2.54.0 anthropic==2.12.0 langchain-openai==1.7.3 litellm==1.106.2 mcp==2.3.0 \
    schemathesis==4.32.5
# Short answers where a request sets no length: a busy machine shall write them within the clients' patience.
KEEL_DEVICE=cpu "$keel" serve --port 0 --max-tokens 256 2>"$folder/log" &
server=$!
for _ in $(seq 100); do
    grep -q "is served at" "$folder/log" && break
    sleep 0.1
done
KEEL_URL=$(sed -n 's/.*is served at //p' "$folder/log")
export KEEL_URL PATH="$folder/python/bin:$PATH"

for client in openai anthropic langchain litellm; do
    python "${client}_client.py"
done
./schemathesis.sh 50
if command -v npm >/dev/null; then
    cp ai_sdk/package.json ai_sdk/client.mjs "$folder"
    (cd "$folder" && npm install --silent --no-audit --no-fund && node client.mjs)
else
    echo "npm is missing: the AI SDK does not run"
fi
# The latest major version of the client, which the others do not allow next to them.
pip install --quiet openai==3.54.0 && python openai_client.py
echo "all clients work"
