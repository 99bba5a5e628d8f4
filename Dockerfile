# docker build -t train-fsdp . && docker run --rm --gpus all --shm-size 16g -v outputs:/workspace/outputs train-fsdp
# torch's wheels bring CUDA, cuDNN and NCCL; the host has the driver and NVIDIA's container toolkit.
FROM python:3.11-slim-bookworm

# torch.compile makes C and C++ at run time, on a GPU Triton's launchers
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace
COPY requirements.txt setup.sh ./
RUN PIP_NO_CACHE_DIR=1 ./setup.sh

COPY . .
RUN useradd --uid 1000 --create-home train && mkdir outputs && chown train outputs
USER 1000
ENV PATH=/workspace/.venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1
CMD ["python", "train_fsdp.py", "--demo"]
