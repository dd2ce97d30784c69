# The image of a job: Palestra as it is in this folder, with its dependencies. A launched bundle replaces the code.
#    docker build --tag palestra --build-arg EXTRAS=train,ray,s3 .
FROM python:3.11-slim

ARG EXTRAS=train,ray,s3
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# git: a run stores the commit it came from; a C++ compiler: torch.compile and the fused kernels of the CPU
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/palestra
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY docs/reference/palestra.schema.json docs/reference/
COPY examples examples
COPY palestra palestra
RUN pip install --constraint constraints.txt ".[${EXTRAS}]"

WORKDIR /work
CMD ["palestra", "--help"]
