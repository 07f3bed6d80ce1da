"""GLM-4.5-Air by GSPO on 128 chips of v6e (v6e:8x16): a third of a v5p's memory, responses of up to 3,072 tokens.

Everything else as in glm_4_5_air_v5p_64.py. Compiled for this topology (README.md), never trained.

Run: gspax train experiments/glm_4_5_air_v6e_128.py --workdir runs/glm_4_5_air (on every host)
"""

from dataclasses import replace

from glm_4_5_air_v5p_64 import experiment as v5p

from gspax.config import Sampling

experiment = replace(
    v5p,
    name="glm_4_5_air_v6e_128",
    sampling=Sampling(prompts=64, group=16, max_prompt_tokens=1024, max_tokens=3072),
)
