"""The variance of the gradient of a distillation from one response, by the number of kept tokens.

Question. For every set of kept tokens `losses.distill.reverse_kl` has the same expected gradient: that of the reverse
KL. With none it is estimated from the sampled token, with all of the vocabulary it is computed. How much less does the
gradient vary with some tokens kept, and does it matter whose most probable ones they are?

Rule, written before the runs. Five seeds; none is left out. Student and teacher of a seed are the warm start and the
policy of "GRPO, no filter" after 60 rollouts, from the study `filters`. The student samples a response to each of 256
training problems. Primary measure: the trace of the covariance, over responses, of the gradient of the mean divergence
of a response's tokens, divided by the one without kept tokens. A number of kept tokens lowers the variance if the 95 %
interval over seeds of the logarithm of this ratio is below 0, and raises it if it is above. The square of the mean
gradient, without its bias, tells how many responses make the noise as large as the gradient: trace / square.

Run: python experiments/studies/distillation/variance.py RUNS (after `make study NAME=filters`; RUNS is its folder)
"""

from __future__ import annotations

import csv
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from gspax import config
from gspax.data.tasks import sort
from gspax.hf import hf
from gspax.learner.state import abstract_params, load_model
from gspax.losses import distill
from gspax.model import transformer
from gspax.parallel.sharding import make_mesh
from gspax.report.statistics import estimate_mean
from gspax.run.folders import write_atomically

FOLDER = Path(__file__).parent
BEGIN, END = "<!-- results: written from variance.csv -->", "<!-- end of results -->"
SEEDS, RESPONSES, LONGEST = (0, 1, 2, 3, 4), 256, 8
V = sort.tokenizer.vocab_size
KEPT = ((0, "teacher"), *((k, by) for k in (1, 2, 4, 8) for by in ("teacher", "policy")), (V, "teacher"))
MESH = make_mesh(config.Mesh(), jax.devices()[:1])


def load(folder: Path) -> tuple[config.ModelConfig, object]:
    model = hf(folder)
    return model, load_model(model, abstract_params(model, MESH))


def logits_of(params: object, model: config.ModelConfig, tokens_BT: jax.Array) -> jax.Array:
    """float32 [B, T, V]; those at t are what token t was sampled from, so column 0 is 0."""
    segment_BT, tokens_BT = (tokens_BT < V).astype(jnp.int32), jnp.minimum(tokens_BT, V - 1)
    hidden_BTD, _ = transformer.apply(params, model, tokens_BT, segment_BT, mesh=MESH)
    logits_BTV = jnp.einsum("btd,dv->btv", hidden_BTD, transformer.head(params)).astype(jnp.float32)
    return jnp.pad(logits_BTV[:, :-1], ((0, 0), (1, 0), (0, 0)))


def sample(params: object, model: config.ModelConfig, seed: int) -> tuple[jax.Array, jax.Array]:
    """Responses of the student: tokens [B, T], with V after their end, and the mask of the sampled ones."""
    problems = sort.Problems(seed=2000 + seed)
    prompts = [sort.tokenizer.encode(problems.train(i).prompt) for i in range(RESPONSES)]
    length_B = jnp.array([len(ids) for ids in prompts])
    T = int(length_B.max()) + LONGEST
    tokens_BT = jnp.array([[*ids, *[V] * (T - len(ids))] for ids in prompts], jnp.int32)
    (stop,) = sort.tokenizer.stop_ids
    rows_B, done_B, mask_BT = jnp.arange(RESPONSES), jnp.zeros(RESPONSES, bool), jnp.zeros((RESPONSES, T), bool)
    logits = jax.jit(partial(logits_of, model=model))
    for n in range(LONGEST):
        at_B = length_B + n
        law_BV = logits(params, tokens_BT=tokens_BT)[rows_B, at_B]
        drawn_B = jax.random.categorical(jax.random.fold_in(jax.random.key(seed), n), law_BV)
        tokens_BT = tokens_BT.at[rows_B, at_B].set(jnp.where(done_B, V, drawn_B))
        mask_BT = mask_BT.at[rows_B, at_B].set(~done_B)
        done_B |= drawn_B == stop
    return tokens_BT, mask_BT


def divergences(
    params: object, model: config.ModelConfig, teacher_TV: jax.Array, tokens_T: jax.Array, mask_T: jax.Array
) -> jax.Array:
    """The mean divergence of one response's tokens for each entry of `KEPT`."""
    tokens_1T, mask_1T = tokens_T[None], mask_T[None]
    logits_1TV, teacher_1TV = logits_of(params, model, tokens_1T), teacher_TV[None]
    token_1T1 = jnp.minimum(tokens_1T, V - 1)[..., None]
    both = logits_1TV, teacher_1TV
    logp_1T, teacher_logp_1T = (distill.select_logp(each, token_1T1)[..., 0] for each in both)
    values = []
    for count, by in KEPT:
        ranked_1TV = jax.lax.stop_gradient(logits_1TV if by == "policy" else teacher_1TV)
        kept_1TK = jax.lax.top_k(ranked_1TV, count)[1].astype(jnp.int32)
        of = [distill.select_logp(each, kept_1TK) for each in both]
        kept = distill.Kept(*of, (kept_1TK == token_1T1).any(-1))
        values.append(distill.reverse_kl(logp_1T, teacher_logp_1T, mask_1T, kept).value[0])
    return jnp.stack(values)


def measure(runs: Path, seed: int) -> list[dict[str, object]]:
    """A line for each entry of `KEPT`: trace of the covariance, and square of the mean, of a response's gradient."""
    model, student = load(runs / "starts" / f"sort_{seed}")
    of_teacher, teacher = load(runs / "GRPO__no_filter" / str(seed))
    tokens_BT, mask_BT = sample(student, model, seed)
    teacher_BTV = jax.jit(partial(logits_of, model=of_teacher))(teacher, tokens_BT=tokens_BT)

    def flat_gradients(params: object, row: tuple[jax.Array, ...]) -> jax.Array:
        """float32 [K, N]"""
        _, pull = jax.vjp(lambda params: divergences(params, model, *row), params)
        (grads,) = jax.lax.map(pull, jnp.eye(len(KEPT)))
        return jnp.concatenate([leaf.reshape(len(KEPT), -1) for leaf in jax.tree.leaves(grads)], axis=1)

    @jax.jit
    def add(params: object, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """The sums over responses of the gradients [K, N] and of their squares [K]."""

        def step(sums: tuple[jax.Array, jax.Array], row: tuple[jax.Array, ...]) -> tuple[object, None]:
            flat_KN = flat_gradients(params, row)
            return (sums[0] + flat_KN, sums[1] + (flat_KN**2).sum(-1)), None

        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        return jax.lax.scan(step, (jnp.zeros((len(KEPT), size)), jnp.zeros(len(KEPT))), rows)[0]

    total_KN, square_K = map(np.float64, add(student, (teacher_BTV, tokens_BT, mask_BT)))
    mean_K = ((total_KN / RESPONSES) ** 2).sum(-1)
    trace_K = (square_K / RESPONSES - mean_K) * RESPONSES / (RESPONSES - 1)
    lines = zip(KEPT, trace_K, mean_K - trace_K / RESPONSES, strict=True)
    return [dict(seed=seed, kept=k, by=by, trace=trace, square=square) for (k, by), trace, square in lines]


def tabulate(path: Path) -> str:
    """The table of the page, from the CSV alone."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {key: [row for row in rows if (int(row["kept"]), row["by"]) == key] for key in KEPT}
    lines = [
        [
            *("kept tokens", "most probable by", "variance, of that without kept tokens", "each seed"),
            "responses whose mean has as much noise as gradient",
        ],
        ["---"] * 5,
    ]
    for (count, by), own in found.items():
        ratio = np.array([float(a["trace"]) / float(b["trace"]) for a, b in zip(own, found[KEPT[0]], strict=True)])
        needed = estimate_mean(np.array([float(each["trace"]) / float(each["square"]) for each in own]))
        mean = estimate_mean(np.log(ratio))
        low, middle, high = np.exp([mean.low, mean.mean, mean.high])
        lines.append(
            [
                {0: "none", V: f"all {V}"}.get(count, str(count)),
                "" if count in (0, V) else f"the {'student' if by == 'policy' else by}",
                "1" if count == 0 else f"{middle:.3g} [{low:.3g}, {high:.3g}]",
                ", ".join(f"{each:.3g}" for each in ratio) if count else "",
                f"{needed.mean:.3g} [{needed.low:.3g}, {needed.high:.3g}]",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(runs: Path | None) -> None:
    path, page = FOLDER / "variance.csv", FOLDER / "README.md"
    if runs is not None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ("seed", "kept", "by", "trace", "square"), lineterminator="\n")
            writer.writeheader()
            for seed in SEEDS:
                for line in measure(runs, seed):
                    writer.writerow(line | {name: f"{line[name]:.5g}" for name in ("trace", "square")})
                file.flush()
                print(f"seed {seed}", flush=True)
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    write_atomically(page, f"{before}{begin}\n{tabulate(path)}\n{end}{after}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
