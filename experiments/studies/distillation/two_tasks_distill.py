"""A student of both experts of `two_tasks.py`; `teacher.models.NAME.checkpoint` is the run of the expert NAME.

Run: gspax train experiments/studies/distillation/two_tasks_distill.py --workdir runs/student \\
       teacher.models.sort.checkpoint=runs/sort_expert teacher.models.addition.checkpoint=runs/addition_expert
"""

from dataclasses import replace

from two_tasks import TASKS
from two_tasks import experiment as of_experts

from gspax.config import Teacher

experiment = replace(
    of_experts,
    name="two_tasks_distill",
    sampling=replace(of_experts.sampling, prompts=256, group=1),
    teacher=Teacher(models={name: replace(of_experts.model, checkpoint=f"runs/{name}_expert") for name in TASKS}),
)
