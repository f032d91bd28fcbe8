#!/usr/bin/env bash
# Sets up and runs every check: lint, types, shell scripts, tests (with torch and transformers to
# compare with). Arguments go to pytest:  bash scripts/test.sh -k attention
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

make_environment .venv test parity

say "lint"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
find . -name '*.sh' -not -path './.venv*' -print0 | xargs -0 .venv/bin/shellcheck -x
say "types"
.venv/bin/mypy
say "tests"
.venv/bin/python -m pytest -n 2 --durations 10 "$@"
