# The environment of the scripts, for CPUs or for NVIDIA GPUs (a driver of CUDA 13 and NVIDIA's container toolkit):
#   docker build -t exactrl .                             docker run --rm -v "$PWD/runs:/exactrl/runs" exactrl python grpo.py
#   docker build -t exactrl --build-arg FLAVOR=cuda .     docker run --rm --gpus all --shm-size 16g ... the same
# Another package index: --build-arg PIP_INDEX_URL=https://... The steps are tested without Docker: tests/docker_steps.py.
FROM debian:bookworm-slim
ARG FLAVOR=cpu
ARG PIP_INDEX_URL

# Python 3.11, and a C++ compiler with Python's headers: Triton and DeepSpeed compile when a run starts.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ git libnuma1 make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /exactrl
# First what the environment follows from, so that an edit of the code does not install it again.
COPY Makefile requirements.txt requirements-cpu.txt ./
COPY locks locks
COPY scripts/setup.sh scripts/prepare_model.py scripts/
RUN FLAVOR=$FLAVOR PIP_NO_CACHE_DIR=1 make setup

COPY . .
ENV PATH=/exactrl/.venv/bin:$PATH
CMD ["python", "grpo.py", "--help"]
