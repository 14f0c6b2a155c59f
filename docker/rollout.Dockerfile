# Rollout image: vLLM's own image, bubblewrap for the sandboxes, this package. From the repository's root:
#   docker build -f docker/rollout.Dockerfile -t megatron-t1-rollout:0.1.0 .
# User namespaces must be allowed in a container that runs sandboxes (docs/sandboxes.md).
ARG BASE_IMAGE=vllm/vllm-openai:v0.32.0
FROM ${BASE_IMAGE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap git python3 \
    && rm -rf /var/lib/apt/lists/*

# vLLM and everything compiled against its torch stay as they are.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Clusters mount the user's home: a torch in ~/.local would come before the image's.
ENV PYTHONNOUSERSITE=1
COPY requirements/rollout-gpu.txt /opt/megatron-t1/requirements/
RUN python3 -m pip list --format=freeze \
    | grep -E '^(vllm|torch|torchvision|torchaudio|triton|transformers|flashinfer-python|xgrammar|nvidia-.*)==' \
        > /opt/megatron-t1/base.txt \
    && python3 -m pip install --constraint /opt/megatron-t1/base.txt \
        --requirement /opt/megatron-t1/requirements/rollout-gpu.txt

# Last, since it changes most often.
COPY pyproject.toml README.md LICENSE /opt/megatron-t1/
COPY conf /opt/megatron-t1/conf
COPY patches /opt/megatron-t1/patches
COPY slurm /opt/megatron-t1/slurm
COPY megatron_t1 /opt/megatron-t1/megatron_t1
RUN python3 -m pip install --constraint /opt/megatron-t1/base.txt /opt/megatron-t1 \
    && python3 -c "import vllm, megatron_t1.cli" \
    && useradd --create-home --no-log-init --uid 10001 sampler

USER 10001
WORKDIR /home/sampler
ENTRYPOINT ["t1"]
