"""The experiment that the faults happen to: a dense layer that learns to sort, with real gradients, 40 ms a step."""

from dataclasses import dataclass, field

from moments import reached

from gspax import advantages, losses
from gspax.config import Evaluation, Experiment, ModelConfig, Optimizer, Sampling, Schedule
from gspax.data.tasks import sort

PROMPTS = 8


@dataclass(frozen=True)
class Problems:
    inner: sort.Problems = field(default_factory=lambda: sort.Problems(min_digits=2, max_digits=3))

    def train(self, index):
        if index % PROMPTS == 0:
            reached("sampling")
        return self.inner.train(index)

    def heldout(self, index):
        if index == 0:
            reached("evaluation")
        return self.inner.heldout(index)


def share_right(problem, completion):
    right = sum(a == b for a, b in zip(problem.answer, completion, strict=False))
    return right / max(len(problem.answer), len(completion))


def standardize(reward_PG):
    reached("update")
    return advantages.standardize(reward_PG)


experiment = Experiment(
    name="victim",
    model=ModelConfig(
        vocab_size=sort.tokenizer.vocab_size,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=0,
        intermediate_size=16,
        rope_theta=1e4,
        tie_word_embeddings=True,
        initializer_range=0.15,
    ),
    data=Problems(),
    tokenizer=sort.tokenizer,
    reward=share_right,
    advantage=standardize,
    loss=losses.gspo,
    sampling=Sampling(prompts=PROMPTS, group=4, max_prompt_tokens=4, max_tokens=4),
    optimizer=Optimizer(learning_rate=1e-3),
    schedule=Schedule(steps=24, minibatches=2, eval_every=6, checkpoint_every=2),
    evaluation=Evaluation(problems=8),
)
