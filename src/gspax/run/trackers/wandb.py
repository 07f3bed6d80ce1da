"""Logs to Weights & Biases. WANDB_PROJECT, WANDB_ENTITY, and WANDB_MODE=offline are read as in any of its programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import wandb


class Tracker:
    """A run of the project WANDB_PROJECT (default: gspax), with the id of the gspax run."""

    def start(self, config: Mapping[str, object], name: str, id: str) -> None:
        """Begin the run, or continue it. RuntimeError without a key, for which wandb would ask the terminal."""
        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
            raise RuntimeError("no API key: `wandb login`, WANDB_API_KEY, or WANDB_MODE=offline")
        project, settings = os.environ.get("WANDB_PROJECT", "gspax"), wandb.Settings(console="off", silent=True)
        self._run = wandb.init(
            project=project,
            id=id,
            name=name,
            config=dict(config),
            resume="allow",
            allow_val_change=True,
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")  # wandb's own steps cannot go back, as a run can

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics, with their step as a separate metric."""
        self._run.log({**metrics, "step": step})

    def finish(self, report: Path | None) -> None:
        """Upload the remaining metrics, and the report as a panel."""
        if report is not None:
            self._run.log({"report": wandb.Html(report.read_text(encoding="utf-8"), data_is_not_path=True)})
        self._run.finish()
