# Rollout image: vLLM for GPUs, bubblewrap for the sandboxes, this package.
#   docker build -f docker/rollout.Dockerfile --build-arg BASE_IMAGE=<a vLLM image> -t megatron-t1-rollout .
# User namespaces must be allowed in the container that runs sandboxes.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}

RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap git python3 \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE /opt/megatron-t1/
COPY megatron_t1 /opt/megatron-t1/megatron_t1
COPY conf /opt/megatron-t1/conf
COPY patches /opt/megatron-t1/patches
COPY slurm /opt/megatron-t1/slurm
RUN pip install --no-cache-dir /opt/megatron-t1

RUN useradd --create-home --uid 1000 sampler
USER sampler
WORKDIR /home/sampler
ENTRYPOINT ["t1"]
