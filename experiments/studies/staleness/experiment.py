"""Sorting with GRPO or GSPO and a sampler on a device of its own; `placement.staleness` is its lag in rollouts."""

from dataclasses import replace
from pathlib import Path

from gspax.config import Placement
from gspax.experiment import load

experiment = replace(load(Path(__file__).parents[2] / "sort_gspo.py"), placement=Placement(devices=1))
