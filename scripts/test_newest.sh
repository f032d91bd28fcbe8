#!/usr/bin/env bash
# The tests under Python 3.12 or newer with the newest jax and friends, in an environment of its own.
# Without torch: the comparisons with transformers run in scripts/test.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

if [[ -z ${PYTHON:-} ]]; then
  for candidate in python3.13 python3.12; do
    if "$candidate" -c 'import venv, ensurepip' >/dev/null 2>&1; then
      PYTHON=$candidate
      break
    fi
  done
fi
[[ -n ${PYTHON:-} ]] || { echo "error: no Python 3.12 or newer found; name one in PYTHON" >&2; exit 1; }
export PYTHON

make_environment .venv-newest test
.venv-newest/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager \
  jax flax optax orbax-checkpoint grain
.venv-newest/bin/python -m pip list 2>/dev/null | grep -iE '^(jax|jaxlib|flax|optax|orbax-checkpoint|grain) '
say "tests"
.venv-newest/bin/python -m pytest -n 2 -m 'not slow and not parity' "$@"
