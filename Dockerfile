# docker build --target cpu -t spec-data:cpu .      docker build --target cuda -t spec-data:cuda .
# docker run --gpus all -v $PWD:/work spec-data:cuda spec-data generate --help
FROM python:3.13-slim AS base
RUN pip install --no-cache-dir uv
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY spec_data spec_data
COPY spec_train spec_train
ARG TORCH=torch==2.13.0
ENV UV_SYSTEM_PYTHON=1 UV_NO_CACHE=1

FROM base AS cpu
RUN uv pip install --torch-backend=cpu "$TORCH" ".[all]"
WORKDIR /work

# flex attention and Triton kernels are compiled where they run, so a compiler comes along
FROM base AS cuda
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN uv pip install --torch-backend=cu130 "$TORCH" ".[all]"
WORKDIR /work
