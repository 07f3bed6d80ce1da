"""Logs to Trackio: a local dashboard, or a Space with TRACKIO_SPACE_ID."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import trackio


class Tracker:
    """A run of the project TRACKIO_PROJECT (default: gspax). Its name ends with the id: trackio continues by name."""

    def start(self, config: Mapping[str, object], name: str, id: str) -> None:
        """Begin the run, or continue it."""
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "gspax"),
            name=f"{name}-{id}",
            config=dict(config),
            resume="allow",
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            embed=False,
        )
        self._last = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step."""
        self._last = step
        self._run.log(dict(metrics), step=step)

    def finish(self, report: Path | None) -> None:
        """Write the remaining metrics, and the report as a page at the last step."""
        if report is not None:
            self._run.log({"report": trackio.Html(report.read_text(encoding="utf-8"))}, step=self._last)
        self._run.finish()
