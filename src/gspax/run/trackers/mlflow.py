"""Logs to MLflow: MLFLOW_TRACKING_URI's server or folder, the experiment MLFLOW_EXPERIMENT_NAME (default: gspax)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param


class Tracker:
    """A run with the tag `gspax_id`, by which it is found again: MLflow chooses the ids of runs itself."""

    def start(self, config: Mapping[str, object], name: str, id: str) -> None:
        """Begin the run with the settings as parameters, or continue it with its first settings."""
        client, title = MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME", "gspax")
        known = client.get_experiment_by_name(title)
        place = client.create_experiment(title) if known is None else known.experiment_id
        found = client.search_runs([place], f"tags.gspax_id = '{id}'", max_results=1)
        run = found[0] if found else client.create_run(place, tags={"gspax_id": id}, run_name=name)
        self._client, self._id = client, run.info.run_id
        client.update_run(self._id, status="RUNNING")
        new = [] if found else [Param(key, str(value)[:500]) for key, value in config.items()]
        for first in range(0, len(new), 100):  # of a request
            client.log_batch(self._id, params=new[first : first + 100])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step."""
        now = int(time.time() * 1000)  # a request may hold 1,000
        self._client.log_batch(self._id, metrics=[Metric(*item, now, step) for item in metrics.items()])

    def finish(self, report: Path | None) -> None:
        """Attach the report and end the run: killed if there is none."""
        if report is not None:
            self._client.log_text(self._id, report.read_text(encoding="utf-8"), report.name)
        self._client.set_terminated(self._id, "FINISHED" if report is not None else "KILLED")
