#!/usr/bin/env bash
# Install the CUDA wheels of locks/cuda.txt into .cuda, next to the environment that runs use. Safe to repeat.
#   PYTHON=python3.11    the interpreter; the lock is of Python 3.11 on x86-64
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() {
    echo "cuda-check: $*" >&2
    exit 1
}

wanted=$(sha256sum locks/cuda.txt | cut -d' ' -f1)
[[ $(cat .cuda/ready 2>/dev/null || true) == "$wanted" ]] && exit 0
python=${PYTHON:-python3}
found=$("$python" -c 'import platform, sys; print(*sys.version_info[:2], platform.machine())') ||
    fail "$python does not run; name a Python 3.11: PYTHON=/path/to/python3.11 make cuda-check"
[[ $found == "3 11 x86_64" ]] ||
    fail "locks/cuda.txt is of Python 3.11 on x86-64, and $python is $found: PYTHON=/path/to/python3.11 make cuda-check"
command -v gcc >/dev/null && command -v nm >/dev/null ||
    fail "the stub libraries are compiled with gcc and read with nm: apt install gcc binutils"
include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
[[ -f $include/Python.h ]] || fail "Triton compiles against $include/Python.h: apt install python3.11-dev"
free=$(df --output=avail -BG . | tail -n 1 | tr -dc 0-9)
((free >= 14)) || fail "$free GB of disk are free; the wheels are 4 GB to download and take 9 GB once installed"
echo "installing locks/cuda.txt into .cuda: 4 GB to download, 9 GB on disk, once"
rm -rf .cuda
"$python" -m venv .cuda
if ! .cuda/bin/python -m pip install --no-input --no-compile --no-cache-dir --progress-bar off \
    --no-deps --require-hashes -r locks/cuda.txt >.cuda/setup.log 2>&1; then
    tail -n 15 .cuda/setup.log >&2
    fail "the installation failed. Check the network and pip's configuration, then try again (full log: .cuda/setup.log)"
fi
echo "$wanted" >.cuda/ready
