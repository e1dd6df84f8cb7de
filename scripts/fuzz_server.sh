#!/bin/sh
# Fuzzes a server over its own description: no request, right or wrong, may end in a 5xx or a dropped connection.
# Usage: scripts/fuzz_server.sh BIN FUZZ_BIN [CASES]: folders of lean-laguna and of schemathesis, number of cases.
set -eu
bin=$1 fuzz=$2 cases=${3:-10000}
port=$("$bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
# Short outputs and a short context: what is tested is the answer's status, not its text.
"$bin/lean-laguna" serve --port "$port" --threads 1 --max-model-len 256 --seed 0 \
  --override-generation-config '{"max_tokens": 8}' &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
url=http://127.0.0.1:$port
until curl --silent --fail --output /dev/null "$url/health"; do
  kill -0 $server || exit 1
  sleep 0.5
done
# Nine operations take a body; each gets its share of the cases.
"$fuzz/st" run "$url/openapi.json" --phases coverage,fuzzing --mode all --max-examples $((cases / 9)) \
  --checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance \
  --request-timeout 120 --continue-on-failure --suppress-health-check all --warnings off --no-color
curl --silent --fail --output /dev/null "$url/health"
echo "the server still answers"
