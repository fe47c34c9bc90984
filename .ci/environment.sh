# What the stages share; sourced by them. `newest` is the environment that the stage `install` makes.
# shellcheck shell=bash
set -euo pipefail
work=$NCCLPY_CI_WORK

full() { [ "$NCCLPY_CI_SET" = full ]; }

readme_command() {
  # The n-th command of the README's first section, as printed there, so that the page cannot drift from what is run.
  sed -n '/^```sh$/,/^```$/p' README.md | grep -v '^```' | sed -n "$1p"
}

activate() {
  # shellcheck disable=SC1090,SC1091
  . "$work/$1/bin/activate"
}

activate_newest() {
  # With the packages of some extras: ncclpy itself is installed, so nothing is built. Stages may run at once, pip not.
  activate newest
  flock "$work/pip.lock" pip install -q "ncclpy[${1:-test}]"
}

install_and_test() {
  # The README's two commands in an environment of their own.
  "$1" -m venv "$work/$2"
  activate "$2"
  printf '\n=== %s: %s\n' "$(python --version)" "$(readme_command 1)"
  eval "$(readme_command 1)"
  printf '\n=== %s: %s\n' "$(python --version)" "$(readme_command 2)"
  eval "$(readme_command 2)"
}
