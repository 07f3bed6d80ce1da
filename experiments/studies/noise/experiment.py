"""sort_gspo.py with problems that come again: `data.count` says how many there are.

Run: gspax train experiments/studies/noise/experiment.py --workdir runs/epochs data.count=128 sampling.noise=problem
"""

from dataclasses import replace
from pathlib import Path

from epochs import Epochs

from gspax.experiment import load

sort = load(Path(__file__).parents[2] / "sort_gspo.py")
experiment = replace(sort, name="epochs", data=Epochs(sort.data))
