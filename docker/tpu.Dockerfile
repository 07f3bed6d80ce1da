# gspax for TPU VMs and for GKE, where tpu/gke/image.sh builds it as the image of the pods. It contains no secrets.
#   docker build --platform=linux/amd64 --file=docker/tpu.Dockerfile --tag=gspax:tpu .
#   docker run --rm --privileged --net=host --volume="$PWD/runs:/gspax/runs" gspax:tpu train FILE --workdir runs/NAME
FROM python:3.12-slim
# The sandbox of `rewards.code`; it needs user namespaces, which `docker run` refuses without further options.
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
WORKDIR /gspax
COPY requirements.txt setup.cfg pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --constraint requirements.txt '.[train,rewards,tpu]'
COPY experiments experiments
ENV PYTHONUNBUFFERED=1
# The list form, so that SIGTERM reaches gspax itself, which then saves a checkpoint.
ENTRYPOINT ["gspax"]
