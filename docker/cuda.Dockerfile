# gspax for NVIDIA GPUs: CUDA 13 comes as Python packages, so the host needs only the driver and NVIDIA's container toolkit.
# Not tried on a GPU. Build it in the root of a clone; it contains no secrets.
#   docker build --file=docker/cuda.Dockerfile --tag=gspax:cuda .
#   docker run --rm --gpus=all --volume="$PWD/runs:/gspax/runs" gspax:cuda train experiments/sort_gspo.py --workdir runs/sort_gspo
FROM python:3.12-slim
# The sandbox of `rewards.code`; it needs user namespaces, which `docker run` refuses without further options.
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
WORKDIR /gspax
COPY requirements.txt setup.cfg pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --constraint requirements.txt '.[train,rewards,gpu]'
COPY experiments experiments
RUN useradd --create-home --uid=1000 gspax && mkdir runs && chown gspax runs
USER 1000
# A run on a machine without a usable GPU is an error, not a slow run on its CPU.
ENV PYTHONUNBUFFERED=1 JAX_PLATFORMS=cuda
# The list form, so that SIGTERM reaches gspax itself, which then saves a checkpoint.
ENTRYPOINT ["gspax"]
CMD ["train", "experiments/sort_gspo.py", "--dry-run"]
