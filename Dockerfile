# NVIDIA image: docker build -t treetune . && docker run --gpus all --shm-size 16g treetune
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
ENV APP_DIRECTORY=/treetune/experiments
VOLUME /treetune/experiments
CMD ["./run.sh"]
