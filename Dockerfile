# NVIDIA image: docker build -t treetune . && docker run --gpus all --ipc=host \
#     -v treetune-experiments:/treetune/experiments -v treetune-models:/treetune/huggingface \
#     -v treetune-data:/treetune/data -v treetune-cache:/treetune/cache treetune
# For a paper's configuration, before treetune: -e CONFIGSTR=configs/polIter_rho1bSft2_vineppo_MATH.jsonnet. Its
# data come once, by the same command that ends: treetune ./scripts/download_and_prepare_datasets.sh
# --ipc=host: two versions of the weights lie in /dev/shm at once, of which Docker has 64 MiB otherwise.
# The -devel base brings nvcc, which DeepSpeed's own operations need.
# This file has been built and run on a CPU (scripts/container/try_container.sh), never with this base image or on a GPU.
ARG BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04
FROM ${BASE}

WORKDIR /treetune
COPY scripts/container/install.sh scripts/container/install.sh
RUN ./scripts/container/install.sh system
RUN useradd --create-home --uid 10001 researcher && chown -R researcher /treetune
USER researcher

# The lock files first: a change of the code alone does not install everything again.
COPY --chown=researcher pyproject.toml README.md LICENSE requirements.txt requirements-cpu.txt requirements-extras.txt ./
COPY --chown=researcher scripts/setup.sh scripts/setup.sh
COPY --chown=researcher src/treetune/__init__.py src/treetune/__init__.py
# nvidia, or cpu on a base image of Debian or Ubuntu
ARG DEVICE=nvidia
# --extras: with what one grader, tool or rule alone needs
ARG EXTRAS=
ENV TREETUNE_DEVICE=${DEVICE} PYTHONUNBUFFERED=1
RUN ./scripts/container/install.sh packages ${EXTRAS}

COPY --chown=researcher . .
RUN ./scripts/container/install.sh compile
# Volumes take the owner of what is below them, which would be root where nothing is.
RUN mkdir -p experiments huggingface data cache
ENV APP_DIRECTORY=/treetune/experiments HF_HOME=/treetune/huggingface
# What vLLM, Triton, Inductor and FlashInfer compile, which each new container would compile anew.
ENV XDG_CACHE_HOME=/treetune/cache TRITON_HOME=/treetune/cache TORCHINDUCTOR_CACHE_DIR=/treetune/cache/inductor \
    FLASHINFER_WORKSPACE_BASE=/treetune/cache
VOLUME ["/treetune/experiments", "/treetune/huggingface", "/treetune/data", "/treetune/cache"]
CMD ["./run.sh"]
