#!/usr/bin/env bash
# Runs the tests of the packages given and ends with the list of what was
# skipped and why. Results go to a JSON file, so that a failure deep in a long
# run can be read afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."

export WARREN_BIN="$PWD/bin"
log=$(mktemp -t warren-test.XXXXXX.json)
status=0
go run gotest.tools/gotestsum@v1.13.0 --format pkgname-and-test-fails --hide-summary=skipped --jsonfile "$log" -- \
	-race -p 2 -timeout 20m "$@" || status=$?

echo
echo "Skipped, and why:"
go run ./scripts/skipped <"$log"
[ $status -eq 0 ] && rm -f "$log" || echo "the full log is in $log"
exit $status
