"""The form of a run's prompts: a text in it has the tokens that a problem with this text has in a rollout."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from api import begin_conversation, encode_problem
from chat_templates import PUBLISHED, write_folder

from gspax.data import hf_chat, mixture, sequence
from gspax.experiment import describe
from gspax.rewards.environments import ToolUse, calculator
from gspax.tools.prompt_form import read_forms

ROWS = [{"prompt": prompt, "answer": "2"} for prompt in ("1 + 1?", "0 + 2?")]
HELDOUT = [{"prompt": "3 + 3?", "answer": "6"}]
FORMS = {
    "none": {},
    "template": {"template": "Q: {prompt}\nA:"},
    "system": {"system": "Be brief.", "template": "{prompt}\n"},
    "examples": {"examples": (("4 + 4?", "8"), ("4 + 5?", "9")), "system": ""},
}
TOOLS = ToolUse(tools=(calculator(),))


@dataclass(frozen=True)
class Own(ToolUse):
    """Its tools are not in the description of an experiment as those of `ToolUse` are."""


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    pytest.importorskip("transformers")
    return hf_chat(write_folder(tmp_path_factory.mktemp("chat"), PUBLISHED["Qwen3"]), system="Think.", thinking=True)


def recorded(data, environment=None):
    return {"data": describe(data), "environment": describe(environment)}


@pytest.mark.parametrize("environment", [None, TOOLS, Own((calculator(),))])
@pytest.mark.parametrize("form", FORMS)
def test_a_text_becomes_the_prompt_of_a_rollout(chat, form, environment):
    data = sequence(ROWS, heldout=HELDOUT, **FORMS[form])
    interaction = environment and SimpleNamespace(environment=environment, tokenizer=chat)
    file = environment if isinstance(environment, Own) else None
    forms = read_forms(recorded(data, environment), file)
    assert len(forms) == (form != "none" or environment is not None)
    for index in range(2):
        problem = data.train(index)
        text = next(row["prompt"] for row in ROWS if row["prompt"] in problem.prompt)
        encode = forms[0].encode if forms else lambda tokenizer, text: tokenizer.encode(text)
        encoded = encode_problem(problem, chat) if interaction is None else begin_conversation(problem, interaction)
        assert list(encode(chat, text)) == list(encoded.prompt)


def test_a_mixture_has_a_form_for_each_that_its_sources_have():
    sources = [sequence(ROWS, heldout=HELDOUT, **form) for form in [*FORMS.values(), FORMS["system"]]]
    shown = [str(form) for form in read_forms(recorded(mixture(*[(source, 1) for source in sources])))]
    assert shown == [
        'in the template "Q: {prompt}\\nA:"',
        'in the template "{prompt}\\n", after the system message "Be brief."',
        'after the system message "", after 2 examples',
    ]


def test_data_of_one_s_own_has_no_form_but_its_tools():
    assert read_forms({"data": {"type": "mine.Data"}}) == []
    assert str(*read_forms({"data": {"type": "mine.Data"}}, TOOLS)) == "with the tools calculator"
