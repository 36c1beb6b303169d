#!/usr/bin/env bash
# Asks a running keel serve everything that its /openapi.json allows, and much that it does not. Fails at the first disagreement.
#
#   pip install schemathesis==4.32.5
#   keel serve & tools/clients/schemathesis.sh [EXAMPLES] [further options of schemathesis]
set -euo pipefail
cd "$(dirname "$0")"
examples=${1:-100}
shift || true
exec schemathesis --config-file schemathesis.toml run "${KEEL_URL:-http://127.0.0.1:8080}/openapi.json" \
    --checks all --max-response-time 60 --max-examples "$examples" --seed "${SEED:-2026}" "$@"
