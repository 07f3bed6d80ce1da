"""Qwen3.5-35B-A3B by GSPO on 64 chips of v6e (v6e:8x8): a third of a v5p's memory, responses of up to 3,072 tokens.

Everything else as in qwen3_5_35b_a3b_v5p_64.py. Compiled for this topology (README.md), never trained.

Run: gspax train experiments/qwen3_5_35b_a3b_v6e_64.py --workdir runs/qwen3_5_35b_a3b (on every host)
"""

from dataclasses import replace

from qwen3_5_35b_a3b_v5p_64 import experiment as v5p
from qwen3_30b_a3b_v6e_64 import experiment as qwen3

experiment = replace(v5p, name="qwen3_5_35b_a3b_v6e_64", sampling=qwen3.sampling, schedule=qwen3.schedule)
