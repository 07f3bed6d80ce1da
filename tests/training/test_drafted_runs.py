"""Runs with drafts: many are right once problems come again, and a resumed run has the same ones."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from api import Rollout, RunDir, loop, record
from small_experiment import experiment

from gspax.config import Evaluation, Optimizer, Sampling
from gspax.data.tasks import sort
from gspax.rollout import earlier
from gspax.rollout.earlier import EarlierTexts

pytestmark = pytest.mark.usefixtures("one_device", "unevaluated")


@dataclass(frozen=True)
class Few(sort.Problems):
    """Four problems, again and again."""

    def train(self, index):
        return super().train(index % 4)


DRAFTED = replace(
    experiment,
    model=replace(experiment.model, num_hidden_layers=1, num_experts=0, intermediate_size=32, initializer_range=0.5),
    data=Few(min_digits=2, max_digits=3),
    warm_start=None,
    optimizer=Optimizer(learning_rate=1e-3),
    sampling=Sampling(prompts=4, group=4, max_prompt_tokens=4, max_tokens=12, temperature=0.3, drafts=3),
    schedule=replace(experiment.schedule, steps=4, minibatches=1, eval_every=0, checkpoint_every=2),
    evaluation=Evaluation(problems=1),
)


def test_a_policy_that_does_not_move_repeats_its_samples_with_the_noise_of_problems(tmp_path, monkeypatch):
    """Also after a resume; the rewards of a group are equal, so that no gradient moves it."""
    seen, keep = [], EarlierTexts.keep

    def note(texts, rollout, group):
        seen.append(np.asarray(rollout.tokens_BT))
        keep(texts, rollout, group)

    monkeypatch.setattr(EarlierTexts, "keep", note)
    sampling = replace(DRAFTED.sampling, noise="problem", temperature=1.0)
    unmoved = replace(DRAFTED, sampling=sampling, reward=no_reward)
    for steps in (2, 3):
        loop.train(replace(unmoved, schedule=replace(DRAFTED.schedule, steps=steps)), tmp_path)
    assert len(seen) == 3 and len(np.unique(seen[0], axis=0)) > 8
    for later in seen[1:]:
        np.testing.assert_array_equal(later, seen[0])
    tokens = [
        row["sampling/tokens_per_pass"]
        for row in record.read_metrics(RunDir(tmp_path).metrics)
        if "sampling/tokens_per_pass" in row
    ]
    assert tokens[0] < 1.5 and min(tokens[1:]) > 2, "drafts are right to the end of each sample"


def no_reward(problem, completion):
    return 0.0


def test_texts_that_do_not_fit_are_not_kept(monkeypatch):
    monkeypatch.setattr(earlier, "MOST", 10)
    texts = EarlierTexts()

    def keep(*lengths):
        lengths = np.array(lengths)
        tokens_BT = np.arange(4 * 9).reshape(4, 9).astype(np.int32)
        tokens_BT[1::2, :2] = tokens_BT[::2, :2]
        others = dict.fromkeys(("mask_BT", "logp_BT", "finished_B"))
        rollout = Rollout(
            tokens_BT=tokens_BT, prompt_length_B=np.full(4, 2), length_B=lengths, passes_B=lengths, **others
        )
        texts.keep(rollout, group=2)

    keep(3, 2, 4, 2)
    assert [*map(len, texts.find([0, 1]))] == [3, 2] and not texts.find([18, 19]), "5 + 6 tokens are more than 10"
    np.testing.assert_array_equal(texts.find([0, 1])[1], [11, 12])
    keep(2, 1, 3, 4)
    loaded = EarlierTexts()
    loaded.load(texts.dump())
    for each in (texts, loaded):
        assert [*map(len, each.find([0, 1]))] == [2, 1] and [*map(len, each.find([18, 19]))] == [3, 4]
        assert each.tokens == 10 and not each.find([3])
