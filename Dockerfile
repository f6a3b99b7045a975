# Cairn: driver, Prefect server and worker, and Ray node in one image, so that none of them differ in version.
#   docker build -t cairn .                                             CPUs
#   docker build -t cairn:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
#   docker build -t cairn:gpu --target gpu .                            GPUs, with all kernels; not built yet: docs/gpus.md
FROM python:3.11.13-slim-bookworm AS build
# A wheel index that is asked for torch alone. The CPU's by default: PyPI's wheel brings several GB of CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/cairn
ENV PATH=/opt/cairn/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
RUN pip install --constraint constraints.txt --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple torch
# megatron-core has wheels for Python 3.11 too, though its metadata asks for 3.12.
RUN pip install --no-deps --ignore-requires-python "$(grep ^megatron-core== constraints.txt)"
COPY . .
RUN pip install --constraint constraints.txt '.[megatron]'

# Everything that a GPU uses. megatron-core 0.19's branch pins Transformer Engine 2.17.1. It and flash-attn are compiled
# against the installed torch, which needs CUDA's compiler and takes long. SGLang has an environment of its own, and
# decides the torch of both: weights are broadcast from one to the other, which needs one version of NCCL.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04 AS gpu
ARG TORCH=2.14.1
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 NVTE_FRAMEWORK=pytorch MAX_JOBS=8
RUN apt-get update && apt-get install --yes --no-install-recommends python3-dev python3-venv git ninja-build \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/cairn && python3 -m venv /opt/sglang
RUN /opt/sglang/bin/pip install torch==$TORCH --index-url https://download.pytorch.org/whl/cu130 \
    --extra-index-url https://pypi.org/simple \
    && /opt/sglang/bin/pip install sglang==0.5.23 sglang-router==0.3.2 fastapi==0.150.0
ENV PATH=/opt/cairn/bin:$PATH CAIRN_SGLANG_PYTHON=/opt/sglang/bin/python
WORKDIR /src
COPY constraints.txt ./
RUN sed "s/^torch==.*/torch==$TORCH/" constraints.txt > /opt/constraints.txt \
    && pip install --constraint /opt/constraints.txt --index-url https://download.pytorch.org/whl/cu130 \
    --extra-index-url https://pypi.org/simple torch setuptools wheel ninja
RUN pip install --no-build-isolation 'transformer-engine[pytorch,core_cu13]==2.17.1' flash-attn==2.8.3
COPY . .
RUN pip install --constraint /opt/constraints.txt '.[megatron]' pytest pytest-timeout pytest-xdist
CMD ["cairn", "--help"]

FROM python:3.11.13-slim-bookworm
RUN useradd --create-home --uid 1000 cairn && install --directory --owner cairn /work /work/build /work/tensorboard
COPY --from=build /opt/cairn /opt/cairn
ENV PATH=/opt/cairn/bin:$PATH PYTHONUNBUFFERED=1
USER cairn
WORKDIR /work
COPY --chown=cairn configs/recipes configs/recipes
COPY --chown=cairn examples examples
CMD ["cairn", "--help"]
