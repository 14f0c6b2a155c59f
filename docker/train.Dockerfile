# Training image: Megatron-Core, Megatron-Bridge and FLA's kernels on NVIDIA's PyTorch image, which has CUDA, cuDNN, NCCL,
# torch, Transformer Engine and Apex. From the repository's root:
#   docker build -f docker/train.Dockerfile -t megatron-t1-train:0.1.0 .
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.08-py3
FROM ${BASE_IMAGE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# What the base was built with stays as it is: its torch and everything compiled against it. The base's own constraints
# (PIP_CONSTRAINT) fix far more, some of it below what Megatron-Bridge asks for, so they are left aside.
ENV PIP_CONSTRAINT="" PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Clusters mount the user's home: a torch in ~/.local would come before the image's.
ENV PYTHONNOUSERSITE=1
COPY requirements/train-gpu.txt /opt/megatron-t1/requirements/
RUN pip list --format=freeze \
    | grep -E '^(torch|torchvision|triton|pytorch-triton|transformer[-_]engine|apex|flash[-_]attn|nvidia-.*)==' \
        > /opt/megatron-t1/base.txt \
    && pip install --constraint /opt/megatron-t1/base.txt --requirement /opt/megatron-t1/requirements/train-gpu.txt

# Last, since it changes most often.
COPY pyproject.toml README.md LICENSE /opt/megatron-t1/
COPY conf /opt/megatron-t1/conf
COPY patches /opt/megatron-t1/patches
COPY slurm /opt/megatron-t1/slurm
COPY megatron_t1 /opt/megatron-t1/megatron_t1
RUN pip install --constraint /opt/megatron-t1/base.txt /opt/megatron-t1 \
    && python3 -c "import megatron.core, megatron_t1.cli" \
    && useradd --create-home --no-log-init --uid 10001 trainer

USER 10001
WORKDIR /home/trainer
ENTRYPOINT ["t1"]
