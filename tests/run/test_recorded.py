"""Whatever has become of a run's experiment.json: what is read from it has the recorded types, or one sentence."""

import copy
import json
from dataclasses import replace

import pytest
from api import RunDir, describe_generation
from small_experiment import experiment

from gspax.config import Lora
from gspax.config.model import architecture_problems
from gspax.data import CharChat
from gspax.errors import UserError
from gspax.experiment import describe
from gspax.experiment.validation.fields import range_problems, type_problems
from gspax.rewards.environments import ToolUse
from gspax.rewards.environments.tools import calculator
from gspax.run.recorded import read_recorded, read_tokenizer
from gspax.tools.prompt_form import read_forms

REMOVED = "removed"
RECORDED = describe(
    replace(
        experiment,
        tokenizer=CharChat(experiment.tokenizer.alphabet),
        environment=ToolUse(tools=(calculator(),)),
        lora=Lora(rank=2),
        sampling=replace(experiment.sampling, stop=("0",)),
    )
)


def places(value, place=()):
    """The place of each field in a description, and of the first element of each list."""
    yield from [place] if place else []
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*place, key))


def damaged(description, place, value):
    changed = copy.deepcopy(description)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    if value is REMOVED:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return changed


def read(run):
    recorded = read_recorded(run)
    tokenizer, forms = read_tokenizer(recorded.experiment["tokenizer"]), read_forms(recorded.experiment)
    return [recorded.model, recorded.lora, tokenizer], [form for form in forms if describe_generation(recorded)]


def test_an_undamaged_description_is_read(tmp_path):
    run = RunDir(tmp_path)
    run.experiment.write_text(json.dumps(RECORDED))
    (model, lora, tokenizer), forms = read(run)
    assert (model, lora, tokenizer) == (experiment.model, Lora(rank=2), CharChat(experiment.tokenizer.alphabet))
    assert [form.tools[0]["function"]["name"] for form in forms] == ["calculator"]


@pytest.mark.parametrize("value", [REMOVED, None, 5, "x", [1], {}, -1, 10**30], ids=repr)
def test_a_damaged_field_is_one_sentence_or_has_its_type(value, tmp_path):
    run, refused = RunDir(tmp_path), 0
    for place in places(RECORDED):
        if place[0] not in ("name", "model", "data", "loss", "lora", "sampling", "tokenizer", "environment"):
            continue
        run.experiment.write_text(json.dumps(damaged(RECORDED, place, value)))
        try:
            records, _ = read(run)
        except UserError as problem:
            refused += 1
            starts = str(run.experiment), "tokenizer: ", "tool calculator: ", "experiment.json: "
            assert "\n" not in str(problem) and str(problem).startswith(starts)
        else:
            found = [sentence for record in records if record for sentence in type_problems(record)]
            found += [sentence for record in records[:2] if record for sentence in range_problems(record)]
            assert not [*found, *architecture_problems(records[0])], place
    assert refused > 10
