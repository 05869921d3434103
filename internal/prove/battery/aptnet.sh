need apt-get
export DEBIAN_FRONTEND=noninteractive
timeout 60 apt-get -o Acquire::Retries=0 -o Acquire::http::Timeout=8 -o Acquire::https::Timeout=8 update >log 2>&1 || true
if grep -qE '^(Err|W:|E:)' log; then skip "no package archive answers from inside: $(grep -E '^(Err|W:|E:)' log | head -n 1)"; fi
grep -qE '^(Hit|Get)' log || skip "no archive is configured"
apt-get install -y --no-install-recommends hello >log 2>&1 || { tail -n 5 log >&2; exit 1; }
hello >/dev/null
echo "hello, from the network"
