# An image with ditmesh and the tested versions of what it needs.
#
#   docker build -t ditmesh .                                        CPU
#   docker build -t ditmesh:cuda --build-arg TORCH=cu128 .           NVIDIA GPUs (not yet tried on one)
#   docker run --rm --ipc=host -v "$PWD:/work" ditmesh generate "a red fox" --devices 2 --out pictures
#   docker run --rm --ipc=host --gpus all ditmesh:cuda doctor
#   docker run --rm --init --ipc=host -p 127.0.0.1:8000:8000 ditmesh serve --host 0.0.0.0 --folder /tmp/serve
#
# --ipc=host: NCCL passes messages through /dev/shm, of which a container has 64 MB by default.
FROM python:3.11-slim-bookworm

# Which of https://download.pytorch.org/whl/ torch comes from: cpu, cu126, cu128 ...
ARG TORCH=cpu

WORKDIR /opt/ditmesh
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN python -m pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/${TORCH}" "$(grep '^torch==' constraints.txt)"
COPY src ./src
RUN python -m pip install --no-cache-dir -c constraints.txt '.[lora,serve,t5]'

# Models that are fetched stay in a volume: -v models:/models
ENV HF_HOME=/models
RUN useradd --create-home ditmesh && mkdir /models /work && chown ditmesh /models /work
USER ditmesh
WORKDIR /work

ENTRYPOINT ["ditmesh"]
CMD ["--help"]
