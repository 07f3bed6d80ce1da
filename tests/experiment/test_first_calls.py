"""Rewards, demonstrations and environments that break their contract are found by one call each, before training."""

import importlib.util
import re
import shutil
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from api import loop, main, tasks
from chat_templates import PUBLISHED, write_folder
from small_experiment import experiment

from gspax import advantages, data, losses
from gspax.config import Evaluation, Grading, Reference, Task, WarmStart
from gspax.data import CharChat, CharTokenizer, Problem, hf_chat, reward_answer
from gspax.data.tasks import sort
from gspax.errors import UserError, how_to_install
from gspax.experiment.validation.first_calls import check_calls
from gspax.losses import kl, shaping
from gspax.rewards import code, format, http, length, math
from gspax.rewards.calls import Batched
from gspax.rewards.combination import combine, weighted_sum
from gspax.rewards.environments import Step, ToolUse, python
from gspax.rewards.guard import guard

FILE = Path(__file__).parents[1] / "small_experiment.py"


def one(problem, completion):
    return 1.0


def two(problem, completion):
    return {"answer": 1.0, "form": 0.5}


def nothing(problem, completion):
    print(completion)


async def ask_nothing(problem, completion):
    return None


def batch(problems, completions):
    return [None for _ in completions]


def unreachable(problem, completion):
    raise ConnectionError("no judge")


def slow(problem, completion):
    time.sleep(5)


def check(**changes):
    """The sentences and the warnings of an experiment's calls."""
    notes = []
    try:
        check_calls(replace(experiment, **changes), notes.append)
    except UserError as error:
        return str(error).splitlines(), notes
    return [], notes


CHAT = CharChat(experiment.tokenizer.alphabet)
TASK = Task(name="own", data=experiment.data, problems=2, reward=nothing)
NUMBERS = "wanted a number, a tuple or a mapping of numbers, got None"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reward": print}, f"reward: builtins.print: {NUMBERS} for the prompt '"),
        ({"reward": ask_nothing}, f"reward: test_first_calls.ask_nothing: {NUMBERS}"),
        ({"reward": Batched(batch)}, f"reward: test_first_calls.batch: {NUMBERS}"),
        (
            {"reward": partial(weighted_sum, rewards={"own": nothing, "good": one})},
            f"reward: test_first_calls.nothing: {NUMBERS}",
        ),
        (
            {"reward": one, "advantage": advantages.gdpo},
            "reward: test_first_calls.one: wanted as many rewards as gspax.advantages.gdpo takes, got 1",
        ),
        (
            {"reward": sort.reward, "advantage": advantages.gdpo},
            "reward: gspax.data.tasks.sort.reward: wanted as many rewards as gspax.advantages.gdpo takes, got 1",
        ),
        (
            {"reward": two},
            "reward: test_first_calls.two: wanted as many rewards as gspax.advantages.standardize takes, got 2",
        ),
        (
            {"reward": two, "advantage": partial(advantages.gdpo, weights=(1.0, 1.0, 1.0))},
            "reward: test_first_calls.two: wanted as many rewards as gspax.advantages.gdpo takes, got 2",
        ),
        (
            {"evaluation": Evaluation(tasks=(TASK,))},
            f"evaluation.tasks.own.reward: test_first_calls.nothing: {NUMBERS}",
        ),
        (
            {"warm_start": WarmStart(demonstration=lambda problem, rng: 3)},
            "warm_start.demonstration: test_first_calls.<lambda>: wanted a text without an environment, got 3 for the",
        ),
    ],
)
def test_a_return_value_that_breaks_the_contract_is_one_error(changes, said):
    (found,), notes = check(**changes)
    assert found.startswith(said) and "\n" not in found and not notes


@pytest.mark.parametrize(
    ("reward", "answer", "said"),
    [
        (math.reward, "She has 3 + 4 = 7.\nSo it is 7.", "wanted a final answer, bare or after #### or in"),
        (math.reward, "3 + 4 = 7\n####", "wanted a final answer after ####, got none"),
        (partial(weighted_sum, rewards={"right": math.reward}), r"so \boxed{7", "wanted a final answer in the box"),
    ],
)
def test_an_answer_that_cannot_be_graded_is_found_in_a_sample_of_rows(reward, answer, said):
    rows = data.sequence([Problem(f"{n}=", answer) for n in range(40)])
    found = check(data=rows, reward=reward)[0][0]
    assert found.startswith(f"reward: the answer of problem 0: {said}")


UNANSWERED = data.sequence([Problem(f"{n}=") for n in range(40)], answer=None)


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (math.reward, "rewards.math.reward"),
        (partial(weighted_sum, rewards={"right": math.reward, "own": one}), "rewards.combination.weighted_sum"),
        (partial(data.reward_answer, reward=math.reward), "data.reward_answer"),
        (partial(code.reward, allow_code_execution=True, isolation="none"), "rewards.code.reward"),
    ],
)
def test_a_problem_needs_an_answer_only_where_a_reward_compares_it(reward, name):
    assert check(data=UNANSWERED, reward=one) == ([], [])
    (found,), _ = check(data=UNANSWERED, reward=reward)
    assert found.startswith(f"reward: gspax.{name}: wanted problems with an answer, got none for '")
    task = Task(name="own", data=UNANSWERED, problems=2, reward=tasks.reward_math)
    (found,), _ = check(evaluation=Evaluation(tasks=(task,)))
    assert found.startswith("evaluation.tasks.own.reward: gspax.evaluation.tasks.reward_math: wanted problems with an")
    with pytest.raises(UserError, match="wanted problems with an answer"):
        reward(Problem("Write a poem."), "\\boxed{3}")


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": two, "advantage": advantages.gdpo},
        {
            "reward": two,
            "advantage": partial(advantages.gdpo, weights=(1.0, 1.0, 1.0)),
            "length_reward": partial(shaping.soft_overlong_punishment, max_length=4, buffer=2),
        },
        {
            "reward": two,
            "advantage": partial(advantages.gdpo, weights=(1.0, 1.0, 1.0)),
            "reference": Reference(reward=kl.k1),
        },
        {"reward": partial(combine, rewards={"a": one, "b": one}), "advantage": advantages.gdpo},
        {"warm_start": None},
    ],
)
def test_functions_that_keep_their_contract_give_no_error(changes):
    assert check(**changes) == ([], [])


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (unreachable, "ConnectionError: no judge (tests/experiment/test_first_calls.py:"),
        (slow, "late: no answer after"),
    ],
)
def test_a_failing_judge_is_only_a_warning(reward, reason, monkeypatch):
    monkeypatch.chdir(FILE.parents[1])
    found, (note,) = check(reward=reward, grading=Grading(timeout=0.2))
    assert found == [] and note.startswith(f"reward: test_first_calls.{reward.__name__}: {reason}")
    assert " for the prompt '" in note and "\n" not in note


@pytest.mark.parametrize(
    "reward",
    [
        partial(http.reward, url="http://127.0.0.1:9/"),
        partial(guard, reward=partial(http.reward, url="http://127.0.0.1:9/")),
        partial(weighted_sum, rewards={"judge": partial(http.reward, url="http://127.0.0.1:9/")}),
    ],
)
def test_rewards_of_gspax_are_not_called(reward):
    assert check(reward=reward) == ([], [])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "wanted allow_code_execution=True for rewards that run programs a model has written"),
        (
            {"allow_code_execution": True},
            "isolation: wanted the program bwrap (apt-get install bubblewrap), ",
        ),
        ({"allow_code_execution": True, "isolation": "none"}, None),
        (
            {"allow_code_execution": "no", "isolation": "none"},
            "wanted allow_code_execution=True for rewards that run programs a model has written, got 'no'",
        ),
    ],
)
def test_programs_that_cannot_run_are_one_error(settings, said, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    reward = partial(code.reward, **settings)
    start = f"reward: gspax.rewards.code.reward: {said}"
    for whole in (partial(weighted_sum, rewards={"tests": reward}), partial(guard, reward=reward)):
        found, _ = check(reward=whole)
        assert [each[: len(start)] for each in found] == ([start] if said else [])


def test_a_tool_without_its_sandbox_is_one_error(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (found,), _ = check(
        environment=ToolUse(tools=(python(allow_code_execution=True),)), warm_start=None, tokenizer=CHAT
    )
    assert found.startswith(
        "environment: gspax.rewards.environments.tools.run_python: isolation: wanted the program bw"
    )


@dataclass(frozen=True)
class Talk:
    """An environment that answers every message with `answer`, or raises it."""

    answer: object

    def reset(self, problem):
        return 7, [{"role": "user", "content": problem.prompt}]

    def step(self, state, message):
        assert state == 7 and isinstance(message, str)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "errors", "notes"),
    [
        (Step(done=True), [], []),
        ((None, ()), ["wanted a gspax.rewards.environments.Step, got tuple"], []),
        (Step(reward=None), [f"reward: {NUMBERS}"], []),
        (Step(), ["reply: wanted a message, or done=True, got neither"], []),
        (Step(messages=[{"role": "user", "content": "é"}]), ["reply: ValueError: character 'é' of "], []),
        (Step(messages="well done"), ["reply: TypeError: string indices must be integers"], []),
        (Step(metrics={"score": None}), ["metrics: wanted numbers by name, got {'score': None}"], []),
        (TimeoutError("no game"), [], ["TimeoutError: no game ("]),
    ],
)
def test_one_step_of_an_environment_is_tried(answer, errors, notes):
    found = check(environment=Talk(answer), warm_start=None, tokenizer=CHAT)
    for sentences, starts in zip(found, (errors, notes), strict=True):
        assert len(sentences) == len(starts)
        for sentence, start in zip(sentences, starts, strict=True):
            assert sentence.startswith(f"environment: test_first_calls.Talk.step: {start}")


def test_a_demonstration_may_be_several_messages_with_an_environment():
    changes = {"environment": Talk(Step(done=True)), "tokenizer": CHAT}
    assert check(**changes, warm_start=WarmStart(demonstration=lambda p, rng: ["1", "2"])) == ([], [])
    (found,), _ = check(**changes, warm_start=WarmStart(demonstration=lambda p, rng: ["1", 2]))
    assert "wanted a text or a sequence of texts, got ['1', 2]" in found


def test_a_dry_run_calls_the_reward(capsys):
    assert main.main(["train", str(FILE), "--dry-run", "reward=builtins.print"]) == 2
    assert capsys.readouterr().err.startswith(f"gspax: reward: builtins.print: {NUMBERS}")


def test_a_run_calls_the_reward_before_the_warm_start(tmp_path):
    with pytest.raises(UserError, match=r"^reward: test_first_calls\.nothing: wanted a number"):
        loop.train(replace(experiment, reward=nothing), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def wrong_is_none(problem, completion):
    return 1.0 if completion == problem.answer else None


def lookup(problem, completion):
    return problem.metadata["target"]


def first_digit(problem, completion):
    return re.match(r"\d", completion).group() == problem.answer[0]


def misspelled(problem, completion):
    return 1.0 if completion else scores(problem)  # noqa: F821


def of_trl(completions, answer, **others):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def list_of_trl(prompts, completions, **others):
    return [1.0 for _ in completions]


def other_names(problem, completion):
    return {"right": 1.0} if completion == problem.answer else {"wrong": 0.0}


def to_be_written(problem, completion):
    raise NotImplementedError


def leaves(problem, completion):
    raise SystemExit(3)


def always_three(problems, completions):
    return [1.0, 1.0, 1.0]


def always_one(problems, completions):
    return [1.0]


CALLED = "; a reward is called as reward(problem, completion), for one completion"


@pytest.mark.parametrize(
    ("reward", "start", "end"),
    [
        (wrong_is_none, NUMBERS, ""),
        (lookup, "KeyError: 'target' (", CALLED),
        (misspelled, "NameError: name 'scores' is not defined (", " and the completion ''"),
        (of_trl, "TypeError: 'Problem' object is not iterable (", CALLED),
        (list_of_trl, "wanted a number, a tuple or a mapping of numbers, got [1.0, ", ""),
        (other_names, "wanted the same names of rewards for every completion, got ['wrong'] after ['right']", ""),
        (to_be_written, "NotImplementedError (", CALLED),
        (leaves, "SystemExit: 3 (", CALLED),
        (Batched(always_three), "wanted a value for each of 1 completions, got 3", ""),
        (Batched(always_one), "wanted a value for each of 3 completions, got 1", ""),
        (partial(guard, timeout=60.0, reward=wrong_is_none), "no number: wanted a number, ", ""),
        (partial(guard, timeout=60.0, reward=lookup), "raised: KeyError: 'target' (", CALLED),
        (
            partial(guard, timeout=60.0, reward=lambda problem, completion: 1.0),
            "reward: wanted a function that can be pickled",
            "",
        ),
        (
            partial(guard, timeout=60.0, reward=partial(weighted_sum, rewards={"a": lookup})),
            "raised: KeyError: 'target' (",
            CALLED,
        ),
    ],
)
def test_a_reward_that_is_broken_is_one_error(reward, start, end):
    (found,), notes = check(reward=reward)
    name = found.split(": ")[1]
    assert found.startswith(f"reward: {name}: {start}") and found.endswith(end) and not notes
    assert name.startswith("test_first_calls.")


def test_a_mistake_for_some_completions_is_a_warning():
    found, (note,) = check(reward=first_digit)
    assert not found and "AttributeError: 'NoneType'" in note and note.endswith(" and the completion ''")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (
            partial(format.match, pattern="(a"),
            "format.match: pattern: wanted a regular expression, got '(a': missing ),",
        ),
        (
            partial(format.match_tags, tags="think"),
            "format.match_tags: tags: wanted names of tags, such as ('think', 'answer'), got 'think'",
        ),
        (
            partial(length.within, at_least=10, at_most=5),
            "length.within: at_most: wanted 0 <= at_least <= at_most and slack >= 0, got at_least=10, at_most=5",
        ),
        (partial(length.within, unit="pages"), "length.within: unit: wanted one of words, characters, lines, got"),
        (partial(weighted_sum, rewards={}), "combination.weighted_sum: rewards: wanted functions by name, got {}"),
        (
            partial(weighted_sum, rewards={"right": one}, weights={"form": 0.1}),
            "combination.weighted_sum: weights: wanted names of rewards (right), got form",
        ),
        (
            partial(weighted_sum, rewards={"right": one}, weights={"right": float("nan")}),
            "combination.weighted_sum: weights: wanted finite numbers, got nan",
        ),
    ],
)
def test_keywords_that_make_no_reward_are_one_error(reward, said):
    (found,), _ = check(reward=reward)
    assert found.startswith(f"reward: gspax.rewards.{said}")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (
            partial(http.reward, url="file:///etc/passwd"),
            "url: wanted a URL of http or https, got 'file:///etc/passwd'",
        ),
        (partial(http.reward, url="http://[::1"), "url: wanted a URL of http or https, got 'http://[::1'"),
        (partial(http.reward, url="http://a/a b"), "url: wanted a URL of http or https, got 'http://a/a b'"),
        (
            partial(http.reward, url="http://judge:secret@127.0.0.1:9/"),
            "url: wanted none with a user name, which would not be sent; token_variable names a token that is",
        ),
        (
            partial(http.reward, url="http://127.0.0.1:9/", request=nothing, response=nothing),
            "response: wanted a function of 1 arguments, got test_first_calls.nothing: "
            "missing a required argument: 'completion'",
        ),
        (
            partial(http.reward, url="http://127.0.0.1:9/", token_variable="NOT_SET_ANYWHERE"),
            "token_variable: wanted the environment variable NOT_SET_ANYWHERE, it is not set",
        ),
    ],
)
@pytest.mark.parametrize("wrap", [lambda reward: reward, lambda reward: partial(combine, rewards={"judge": reward})])
def test_a_judge_that_cannot_be_asked_is_one_error(reward, said, wrap):
    assert check(reward=wrap(reward)) == ([f"reward: gspax.rewards.http.reward: {said}"], [])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda reward: {"reward": reward},
        lambda reward: {"reward": partial(weighted_sum, rewards={"answer": reward})},
        lambda reward: {"reward": partial(guard, reward=reward)},
        lambda reward: {"reward": partial(reward_answer, reward=partial(combine, rewards={"answer": reward}))},
        lambda reward: {"reward": partial(own_composition, reward=reward)},
        lambda reward: {"evaluation": Evaluation(tasks=(replace(TASK, reward=reward),))},
    ],
)
@pytest.mark.parametrize("reward", [math.reward, partial(math.reward, form="boxed"), tasks.reward_math])
def test_a_missing_package_is_one_error(wrap, reward, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (found,), _ = check(**wrap(reward))
    assert "_math: wanted the package math-verify" in found or "math.reward: wanted the package math-verify" in found
    assert how_to_install("rewards") in found


def own_composition(problem, completion, *, reward):
    return 1.0


@dataclass(frozen=True)
class Silent(CharTokenizer):
    """A tokenizer that gives no text back."""

    def decode(self, ids):
        return None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"sampling": replace(experiment.sampling, max_prompt_tokens=2)},
            "data: training prompts: 32 of 32 have more than sampling.max_prompt_tokens=2 tokens (3 to 4)",
        ),
        (
            {"tokenizer": CharTokenizer("012345678=")},
            "data: training prompts: 5 of 32 cannot be encoded: ValueError: character '9' of ",
        ),
        ({"tokenizer": CharTokenizer("abc")}, "data: held-out prompts: 16 of 16 cannot be encoded: ValueError: "),
        ({"tokenizer": Silent(experiment.tokenizer.alphabet)}, "tokenizer: wanted a text from decode, got None"),
        (
            {"warm_start": replace(experiment.warm_start, demonstration=lambda problem, rng: "123456789")},
            "warm_start: prompts with demonstrations: 48 of 48 have more than sampling.max_prompt_tokens + max_tok",
        ),
        (
            {"warm_start": replace(experiment.warm_start, demonstration=lambda problem, rng: "a")},
            "warm_start: prompts with demonstrations: 48 of 48 cannot be encoded: ValueError: character 'a' of 'a' is",
        ),
        (
            {"evaluation": Evaluation(tasks=(replace(TASK, reward=one, max_prompt_tokens=2),))},
            "evaluation.tasks.own: prompts: 2 of 2 have more than evaluation.tasks.own.max_prompt_tokens=2 tokens (3)",
        ),
    ],
)
def test_the_first_prompts_are_encoded(changes, said):
    found, notes = check(reward=one, **changes)
    matches = [sentence for sentence in [*found, *notes] if sentence.startswith(said)]
    assert matches, (found, notes)
    assert all("skipped" in note for note in notes)


@dataclass(frozen=True)
class Opening(CharTokenizer):
    """A tokenizer whose prompts open thinking."""

    def encode(self, text):
        return super().encode(f"{text}<think>")

    def encode_completion(self, text):
        return super().encode(text)


@pytest.mark.parametrize(
    ("tokenizer", "shown", "said"),
    [
        (Opening, lambda problem, rng: problem.answer, True),
        (Opening, lambda problem, rng: f"8</think>{problem.answer}", False),
        (Opening, lambda problem, rng: ["8</think>8", problem.answer], True),
        (CharTokenizer, lambda problem, rng: problem.answer, False),
    ],
)
def test_a_demonstration_ends_the_thinking_that_its_prompt_opens(tokenizer, shown, said):
    sampling = replace(experiment.sampling, max_prompt_tokens=40, max_tokens=40)
    own = {"tokenizer": tokenizer("0123456789=</think>"), "model": replace(experiment.model, vocab_size=32)}
    own |= {"sampling": sampling, "warm_start": replace(experiment.warm_start, demonstration=shown)}
    _, notes = check(reward=one, **own)
    told = "warm_start: 8 of 8 demonstrations are thinking without an answer, because their prompts end with <think>: "
    assert [note.startswith(told) for note in notes if "thinking" in note] == [True] * said


@pytest.mark.parametrize(
    ("name", "shown", "lead"),
    [
        ("gpt-oss", "4", "'<|channel|>final<|message|>'"),
        ("gpt-oss", "<|channel|>analysis<|message|>8<|end|><|start|>assistant<|channel|>final<|message|>4", None),
        ("GLM-4.5", "4", r"'\n'"),
        ("GLM-4.5", "\n4", None),
        ("Mistral", "4", "' '"),
        ("Qwen3", "4", None),
        ("Qwen3-Thinking-2507", "8</think>4", None),
    ],
)
def test_a_demonstration_begins_as_the_template_s_answers(tmp_path, name, shown, lead):
    published = PUBLISHED[name]
    tokenizer = hf_chat(write_folder(tmp_path, published), thinking=published.thinking, date=published.date)
    own = {"tokenizer": tokenizer, "model": replace(experiment.model, vocab_size=512)}
    own |= {"sampling": replace(experiment.sampling, max_prompt_tokens=400, max_tokens=100)}
    stage = replace(experiment.warm_start, demonstration=lambda problem, rng: shown)
    _, notes = check(reward=one, warm_start=stage, **own)
    told = [note for note in notes if note.startswith("warm_start: wanted demonstrations that begin with")]
    assert len(told) == (lead is not None) and all(f"begin with {lead}, as" in note for note in told)


def test_warnings_of_a_dry_run_come_last(tmp_path, capfd):
    text = FILE.read_text().replace("return right / max(", "return right / re.match(r'.', completion).end() / max(")
    (tmp_path / "exp.py").write_text(text.replace("from typing", "import re\nfrom typing", 1))
    assert main.main(["train", str(tmp_path / "exp.py"), "--dry-run"]) == 0
    shown = capfd.readouterr()
    assert shown.err.count("warning: reward: experiment_file.share_right: AttributeError") == 1


def multiplied(logp, old_logp, advantage, mask):
    """Wrong: a NaN outside the mask stays one."""
    return losses.Terms(-(jnp.exp(logp - old_logp) * advantage[:, None] * mask).sum(-1), mask.any(-1) * 1.0, {})


def chosen(logp, old_logp, advantage, mask):
    ratio = jnp.exp(jnp.where(mask, logp - old_logp, 0.0))
    return losses.Terms(-(ratio * advantage[:, None] * mask).sum(-1), mask.any(-1) * 1.0, {})


def constant(logp, old_logp, advantage, mask):
    return chosen(jax.lax.stop_gradient(logp), old_logp, advantage, mask)


def divided(logp, old_logp, advantage, mask):
    x = jnp.where(mask, logp - old_logp, 0.0)
    return losses.Terms((x / jnp.abs(x) * advantage[:, None]).sum(-1), mask.any(-1) * 1.0, {})


def squared(logp, old_logp, advantage, mask):
    return losses.Terms((jnp.where(mask, logp, 0.0) ** 2 - jnp.where(mask, logp, 0.0)).sum(-1), mask.any(-1) * 1.0, {})


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (chosen, ()),
        (multiplied, ("not finite where log-probs outside the mask are NaN; choose with jnp.where",)),
        (constant, ("its gradient is 0 for every token",)),
        (squared, ("not finite where a token's log-prob is -inf",)),
    ],
)
def test_a_loss_of_ones_own_is_computed_with_a_few_numbers(loss, said):
    notes = []
    check_calls(replace(experiment, loss=loss, warm_start=None), notes.append)
    assert len(notes) == len(said) and all(map(str.__contains__, notes, said))


@pytest.mark.parametrize(("least", "said"), [(0.5, ["advantage: "]), (0.0, [])])
def test_an_advantage_that_is_nan_for_usual_rewards_is_refused(least, said):
    found, _ = check(advantage=lambda reward_PG: jnp.log(reward_PG.at[0].add(-least)), reward=one)
    assert [sentence[:11] for sentence in found] == said
    assert all(
        sentence.endswith("wanted finite numbers for rewards of 0.25 and 0.75, got others") for sentence in found
    )


def test_a_loss_that_is_nan_where_a_run_begins_is_refused():
    wanted = "loss: test_first_calls.divided: wanted a finite value and gradient where the policy has not changed"
    with pytest.raises(UserError, match=wanted):
        check_calls(replace(experiment, loss=divided, warm_start=None), pytest.fail)
