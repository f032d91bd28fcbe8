# shellcheck shell=bash
# Sourced by the scripts beside it: finds a Python, makes a virtual environment, installs jaxlab.

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[[ -t 1 ]] || say() { printf '\n== %s\n' "$*"; }

# Prints the first Python >= 3.11 that runs and can make virtual environments.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.11 python3.13 python3 python; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
      >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
  echo "error: no Python >= 3.11 with the venv module found." >&2
  echo "Install one (Debian: apt-get install python3.11-venv; macOS: brew install python@3.12)" >&2
  echo "or name it: PYTHON=/path/to/python3.12 bash $0" >&2
  return 1
}

# make_environment FOLDER EXTRA…: a virtual environment with this checkout and those extras.
make_environment() {
  local folder=$1 extras python log
  shift
  extras=$(IFS=,; echo "$*")
  if [[ ! -x $folder/bin/python ]]; then
    python=$(find_python)
    say "creating $folder with $("$python" --version)"
    "$python" -m venv "$folder"
  fi
  say "installing jaxlab${extras:+ with $extras} into $folder"
  log=$(mktemp -t jaxlab-pip-XXXXXX)
  if ! "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
    --editable ".${extras:+[$extras]}" >"$log" 2>&1; then
    cat "$log" >&2
    echo "error: pip could not install jaxlab; its output is above" >&2
    return 1
  fi
  rm -f "$log"
}
