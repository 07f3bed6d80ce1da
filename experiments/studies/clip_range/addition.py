"""sort.py on chains of additions.

Run: gspax train experiments/studies/clip_range/addition.py --workdir runs/narrowing loss.first=100
"""

from dataclasses import replace
from pathlib import Path

from gspax.experiment import load

experiment = replace(
    load(Path(__file__).parents[2] / "addition_gspo.py"),
    name="clip_range",
    loss=load(Path(__file__).with_name("sort.py")).loss,
)
