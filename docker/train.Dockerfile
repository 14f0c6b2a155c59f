# Training image: NGC PyTorch (CUDA, cuDNN, NCCL, Transformer Engine and Apex are in it), Megatron-Core, this package.
#   docker build -f docker/train.Dockerfile --build-arg BASE_IMAGE=<an NGC PyTorch image> -t megatron-t1-train .
ARG BASE_IMAGE
FROM ${BASE_IMAGE}

ARG MEGATRON_CORE=0.16.1
RUN pip install --no-cache-dir "megatron-core==${MEGATRON_CORE}" flash-linear-attention

COPY pyproject.toml README.md LICENSE /opt/megatron-t1/
COPY megatron_t1 /opt/megatron-t1/megatron_t1
COPY conf /opt/megatron-t1/conf
COPY patches /opt/megatron-t1/patches
COPY slurm /opt/megatron-t1/slurm
RUN pip install --no-cache-dir /opt/megatron-t1

RUN useradd --create-home --uid 1000 trainer
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["t1"]
