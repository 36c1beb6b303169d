#!/usr/bin/env bash
# What CI runs for the page: types, the committed build, unit tests, and the tests in headless Chromium, about two minutes.
# Needs Node 20 or newer with npm, and Chromium, which root on Debian gets here. KEEL_BIN names a built keel.
# What cannot be tested is noted with the skipped tests, and is an error with KEEL_REQUIRE_PAGE=1.
set -euo pipefail
cd "$(dirname "$0")"

pass_over() {
    echo "THE PAGE IS NOT TESTED: $*" >&2
    [ -z "${KEEL_REQUIRE_PAGE:-}" ] || exit 1
    # The file of keel-testkit's skipped! macro, which .ci/run counts.
    if [ -d ../target/release ]; then
        echo "web::page: $*" >>../target/release/skipped-tests.txt
    fi
    exit 0
}

command -v npm >/dev/null || pass_over "npm is missing"
node -e 'process.exit(parseInt(process.versions.node) >= 20 ? 0 : 1)' || pass_over "Node 20 or newer is needed"

npm ci --ignore-scripts --no-fund --no-audit
npm run check

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
cp ../crates/keel-server/assets/page/policy.txt "$fresh"
node build.mjs "$fresh"
diff -rq "$fresh" ../crates/keel-server/assets/page || {
    echo "the committed page is not what its source builds: run npm run build and commit the result" >&2
    exit 1
}

node --test tests/unit/*.test.mjs

chromium=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
if [ -z "$chromium" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) >/dev/null || true
    chromium=$(command -v chromium || true)
fi
[ -n "$chromium" ] || pass_over "Chromium is missing, so only the tests without a browser ran"
CHROMIUM=$chromium node --test --test-concurrency=1 tests/browser/*.test.mjs
