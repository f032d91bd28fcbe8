# shellcheck shell=bash
# What the scripts beside this file need to know. Set these in your shell, or edit here.
# Sourced by them, with dry_run already set.

: "${PROJECT:=$(gcloud config get-value project 2>/dev/null || true)}" # Google Cloud project
: "${ZONE:=us-east5-a}"              # a zone with quota for the chips: tpu/README.md, step 1
: "${TPU_TYPE:=v5p-128}"             # v5p-N and v4-N count cores (64 chips here), v5litepod-N and v6e-N chips
: "${NAME:=jaxlab}"                  # of the queued resource, the cluster or the workload
: "${BUCKET:=${PROJECT}-jaxlab}"     # checkpoints and data, without gs://
: "${PROVISIONING:=spot}"            # spot (cheap, can be taken away), reserved, or on-demand
: "${SERVICE_ACCOUNT:=}"             # of the TPU VMs; empty: the project's default one
: "${MAX_QUICK_FAILURES:=3}"         # give up after so many failures in a row within QUICK seconds
: "${QUICK:=300}"
: "${POLL:=30}"                      # seconds between looks at a resource that is being made

: "${dry_run:=false}"

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $1"; exit "${2:-1}"; }

# Runs a command, or with --dry-run prints it as it could be pasted into a shell.
run() {
  if [[ $dry_run == true ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

need() { [[ $dry_run == true ]] || command -v "$1" >/dev/null || fail "$1 is not installed: $2"; }

# The image of the TPU VMs that has the driver for a kind of chip.
runtime_version() {
  case $TPU_TYPE in
    v4-*) echo tpu-ubuntu2204-base ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    *) fail "TPU_TYPE=$TPU_TYPE is not known; use v4-N, v5litepod-N, v5p-N or v6e-N" 2 ;;
  esac
}

[[ -n $PROJECT ]] || fail "PROJECT is not set: export PROJECT=your-google-cloud-project" 2
