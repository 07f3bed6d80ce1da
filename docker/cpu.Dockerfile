# gspax for CPUs, with the locked packages. Build it in the root of a clone; it contains no secrets.
#   docker build --file=docker/cpu.Dockerfile --tag=gspax:cpu .
#   docker run --rm --volume="$PWD/runs:/gspax/runs" gspax:cpu train experiments/sort_gspo.py --workdir runs/sort_gspo
FROM python:3.12-slim
# The sandbox of `rewards.code`; it needs user namespaces, which `docker run` refuses without further options.
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
WORKDIR /gspax
COPY requirements.lock ./
RUN pip install --no-cache-dir --require-hashes --requirement requirements.lock
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --no-deps --no-build-isolation .
COPY experiments experiments
RUN useradd --create-home --uid=1000 gspax && mkdir runs && chown gspax runs
USER 1000
ENV PYTHONUNBUFFERED=1
# The list form, so that SIGTERM reaches gspax itself, which then saves a checkpoint.
ENTRYPOINT ["gspax"]
CMD ["train", "experiments/sort_gspo.py", "--dry-run"]
