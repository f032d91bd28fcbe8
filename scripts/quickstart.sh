#!/usr/bin/env bash
# From a fresh clone to a trained model in about five minutes on two CPU cores:
# installs jaxlab into .venv, trains configs/quickstart.yaml from scratch on the Python documentation,
# shows what it learned, then lets a real chat model (SmolLM2, 135M parameters) answer a question.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh

make_environment .venv

say "training a small model from scratch on the Python documentation"
.venv/bin/jaxlab train configs/quickstart.yaml "$@"

question="What is the capital of France, and what is it known for?"
say "asking SmolLM2-135M-Instruct: $question"
.venv/bin/jaxlab generate --model smollm2-135m-instruct --max-new-tokens 80 --prompt "$question"

say "done. Next: .venv/bin/jaxlab chat   ·   .venv/bin/jaxlab train --help"
