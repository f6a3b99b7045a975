# Cairn: driver, Prefect server and worker, and Ray node in one image, so that none of them differ in version.
#   docker build -t cairn .                                             CPUs
#   docker build -t cairn:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
FROM python:3.11.13-slim-bookworm AS build
# A wheel index that is asked for torch alone. The CPU's by default: PyPI's wheel brings several GB of CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/cairn
ENV PATH=/opt/cairn/bin:$PATH
WORKDIR /src
COPY constraints.txt ./
RUN pip install --constraint constraints.txt --index-url "$TORCH_INDEX" --extra-index-url https://pypi.org/simple torch
COPY . .
RUN pip install --constraint constraints.txt '.[megatron]'

FROM python:3.11.13-slim-bookworm
RUN useradd --create-home --uid 1000 cairn && install --directory --owner cairn /work /work/build /work/tensorboard
COPY --from=build /opt/cairn /opt/cairn
ENV PATH=/opt/cairn/bin:$PATH PYTHONUNBUFFERED=1
USER cairn
WORKDIR /work
COPY --chown=cairn configs/recipes configs/recipes
COPY --chown=cairn examples examples
CMD ["cairn", "--help"]
