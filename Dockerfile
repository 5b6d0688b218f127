# NVIDIA image: docker build -t treetune . && docker run --gpus all --ipc=host \
#     -v treetune-experiments:/treetune/experiments -v treetune-models:/treetune/huggingface treetune
# --ipc=host: two versions of the weights lie in /dev/shm at once, of which Docker has 64 MiB otherwise.
# The -devel base brings nvcc, which DeepSpeed's own operations need.
# Not built or run by the test suite.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap ca-certificates g++ git ninja-build python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 researcher
WORKDIR /treetune
RUN chown researcher /treetune
USER researcher

# The lock files first: a change of the code alone does not install everything again.
COPY --chown=researcher pyproject.toml requirements.txt requirements-cpu.txt requirements-dev.txt ./
COPY --chown=researcher scripts/setup.sh scripts/setup.sh
COPY --chown=researcher src/treetune/__init__.py src/treetune/__init__.py
# There is no GPU while the image is built, so the set is named.
ENV TREETUNE_DEVICE=nvidia
RUN ./scripts/setup.sh

COPY --chown=researcher . .
# Set-up leaves byte code out; without it each container would compile torch and vLLM anew. What can't be compiled
# is never imported.
RUN .venv/bin/python -m compileall -q -j 0 .venv src >/dev/null || true
# Volumes take the owner of what is below them, which would be root where nothing is.
RUN mkdir -p experiments huggingface
ENV APP_DIRECTORY=/treetune/experiments HF_HOME=/treetune/huggingface
VOLUME ["/treetune/experiments", "/treetune/huggingface"]
CMD ["./run.sh"]
