# An image with ditmesh and the tested versions of what it needs.
#
#   docker build -t ditmesh .                                        CPU
#   docker build -t ditmesh:cuda --build-arg TORCH=cu130 .           NVIDIA GPUs (not yet tried on one)
#   docker run --rm --ipc=host -v "$PWD:/work" ditmesh generate "a red fox" --devices 2 --out outputs
#   docker run --rm --ipc=host --gpus all ditmesh:cuda doctor
#   docker run --rm --init --ipc=host -p 127.0.0.1:8000:8000 ditmesh serve --host 0.0.0.0 --folder /tmp/serve
#
# --ipc=host: NCCL passes messages through /dev/shm, of which a container has 64 MB by default.
# The user has the number 1000; where yours is another one, so that it may write to /work: --user "$(id -u)"
FROM python:3.11-slim-bookworm

# Which of https://download.pytorch.org/whl/ torch comes from: cpu, cu126, cu130.
ARG TORCH=cpu

# On GPUs torch.compile builds its launchers with a C compiler.
RUN if [ "${TORCH}" != cpu ]; then \
        apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi

# Each layer is made again when a file that it needs has changed: first torch, then the other packages, then ditmesh.
WORKDIR /opt/ditmesh
COPY constraints.txt ./
RUN python -m pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/${TORCH}" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml ./
RUN python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    extras = ("lora", "train", "t5", "serve", "video", "data"); \
    print(*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name]), sep="\n")' \
    > requirements.txt \
    && python -m pip install --no-cache-dir -c constraints.txt -r requirements.txt
COPY README.md LICENSE ./
COPY src ./src
RUN python -m pip install --no-cache-dir --no-deps . ./src/ditmesh/zoo && rm -rf src

# Models that are fetched stay in a volume: -v models:/models
ENV HF_HOME=/models
RUN useradd --create-home --uid 1000 ditmesh && mkdir /models /work && chown ditmesh /models /work
USER ditmesh
WORKDIR /work

# Of `ditmesh serve` at its usual port; other commands have none.
HEALTHCHECK --interval=30s --start-period=120s CMD ! grep -qzx serve /proc/1/cmdline || \
    python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz', timeout=3)"

ENTRYPOINT ["ditmesh"]
CMD ["--help"]
