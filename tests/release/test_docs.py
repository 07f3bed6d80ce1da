"""The docs: links resolve, code blocks run, commands parse, names and paths exist."""

import ast
import configparser
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import runpy
import shlex
from fnmatch import fnmatchcase
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from api import main as program
from api import presets, to_json
from few_devices import few_devices
from latex2mathml.converter import convert

from gspax import advantages, config, data, losses
from gspax import experiment as experiments
from gspax.config import optimizers
from gspax.config.functions import keywords
from gspax.data import huggingface

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "experiments")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
SORT = ROOT / "experiments" / "sort_gspo.py"


def label(path):
    return path.relative_to(ROOT).as_posix()


def read(page):
    return page.read_text(encoding="utf-8")


every_page = pytest.mark.parametrize("page", PAGES, ids=label)


# Links

FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\]\((?!\w+:)([^)\s]*)\)")


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site generate them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", read(page)), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-"))
    return found


def broken_links(page):
    for link in LINK.findall(FENCE.sub("", read(page))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{link}: no such heading; there are {sorted(anchors(target))}"


def test_there_are_pages():
    assert {"README.md", "docs/index.md", "docs/losses.md", "experiments/README.md"} <= {label(page) for page in PAGES}


@every_page
def test_links_resolve(page):
    assert not list(broken_links(page)), "\n".join(broken_links(page))


def test_broken_links_are_detected(tmp_path):
    (tmp_path / "b.md").write_text("# A `title`, here\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md#a-title-here) [y](b.md#other) [z](c.md) [w](https://example.org)\n```\n[q](d.md)\n```\n")
    assert [line.split(":")[0] for line in broken_links(page)] == ["b.md#other", "c.md"]


def test_every_page_is_on_the_site():
    """mkdocs.yml names each page of docs/ once, and only pages that exist."""
    text = read(ROOT / "mkdocs.yml")
    named = re.findall(r"^ +- (?:.*: )?([\w/]+\.md)$", text[text.index("\nnav:") :], re.M)
    inside = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    outside = {name for name in named if (ROOT / name).exists()}
    assert len(named) == len(set(named))
    assert set(named) == inside | outside


def test_the_api_reference_names_modules():
    text = "\n".join(map(read, (ROOT / "docs" / "reference").glob("*.md")))
    names = re.findall(r"^::: (\S+)$", text, re.M)
    assert len(names) > 20
    for name in names:
        file = importlib.util.find_spec(name).origin  # not imported: some modules need optional packages
        assert ast.get_docstring(ast.parse(read(Path(file)))), name


def test_gspax_is_installed_from_a_clone():
    """It is on no package index: no page and no message names it to pip. The page on installing names each extra."""
    files = [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
    named = [label(path) for path in files if re.search(r"pip install\s+['\"]?gspax", read(path))]
    assert not named, named
    settings, page = configparser.ConfigParser(), read(ROOT / "docs" / "install.md")
    settings.read(ROOT / "setup.cfg")
    assert [extra for extra in settings["options.extras_require"] if f"| `{extra}` |" not in page] == ["test"]


# Names and paths in code spans


def spans(page):
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", read(page)))


def modules():
    """{last part of its name: module names} of the package."""
    found = {}
    for path in (ROOT / "src" / "gspax").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        found.setdefault(name.rpartition(".")[2], []).append(name)
    return found


MODULES = modules()


def resolves(name):
    """Whether a dotted name is a module of gspax or something inside one."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.import_module(".".join(parts[:i]))
            break
    else:
        return False
    for part in parts[i:]:
        if part in getattr(found, "__dataclass_fields__", {}):
            return True  # a field without a default is no attribute
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@every_page
def test_names_in_code_spans_exist(page):
    """`gspax.training.loop.train` and, where the first part is a module's name, `losses.gspo`."""
    if page.name in ("LOG.md", "CHANGELOG.md"):
        return  # they describe the past
    wrong = []
    for span in spans(page):
        name = re.split(r"[(=\[ ]", span)[0]
        parts = name.split(".")
        if not re.fullmatch(r"[a-zA-Z_]\w*(\.[a-zA-Z_]\w*)+", name) or parts[-1] in SUFFIXES:
            continue
        candidates = (
            [name] if parts[0] == "gspax" else [f"{each}.{'.'.join(parts[1:])}" for each in MODULES.get(parts[0], [])]
        )
        if candidates and not any(map(resolves, candidates)) and parts[0] not in {*FIELDS, "problem"}:
            wrong.append(span)
    assert not wrong, wrong


SUFFIXES = {
    "py",
    "md",
    "json",
    "jsonl",
    "sh",
    "txt",
    "html",
    "csv",
    "png",
    "svg",
    "yml",
    "cfg",
    "toml",
    "cff",
    "log",
    "safetensors",
}
FIELDS = set(experiments.load(SORT).__dataclass_fields__)  # `model.remat` is a field of an experiment


@every_page
def test_paths_in_code_spans_exist(page):
    """A path with a folder and a known suffix, from the root, the page's folder, docs/ or the package."""
    if page.name in ("LOG.md", "CHANGELOG.md"):
        return
    bases = [ROOT, page.parent, ROOT / "docs", ROOT / "src" / "gspax", ROOT / "experiments", ROOT / "tests"]
    wrong = [
        span
        for span in spans(page)
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+\.(py|md|sh|toml|cfg|png|svg)", span)
        and not any((base / span).exists() for base in bases)
        and not span.startswith(("runs/", "gspax/"))
    ]
    assert not wrong, wrong


# Code blocks

BLOCK = re.compile(r"^```python(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.M | re.S)
# What a block may use without defining it: a user's model and data.
GIVEN = {
    "my_model": lambda params, tokens: params[tokens],
    "base": experiments.load(SORT),
    "my_reward": lambda problem, completion: 0.0,
    "params": jnp.zeros((4, 4)),
    "tokens_BT": jnp.ones((3, 2), jnp.int32),
    "old_logp_BT": jnp.log(jnp.array([[1.0, 0.25]] * 3)),
    "mask_BT": jnp.array([[False, True]] * 3),
}
BLOCKS = [(page, title, code) for page in PAGES for title, code in BLOCK.findall(read(page))]
FILES = {title: code for _, title, code in BLOCKS if title}
EXPERIMENTS = {title for title in FILES if not title.startswith("make_")}  # the others write their data


def block_ids(blocks):
    return [f"{label(page)}-{title or i}" for i, (page, title, _) in enumerate(blocks)]


@pytest.mark.parametrize(("page", "title", "code"), BLOCKS, ids=block_ids(BLOCKS))
def test_blocks_compile(page, title, code):
    compile(code, label(page), "exec")


# Other tests run these blocks and check their results.
ELSEWHERE = {"docs/advantages.md", "docs/checkpoints.md", "docs/corrections.md", "docs/data.md", "docs/losses.md"}
RUNNABLE = [
    (page, title, code) for page, title, code in BLOCKS if not ("..." in code or title or label(page) in ELSEWHERE)
]


@pytest.mark.parametrize(("page", "title", "code"), RUNNABLE, ids=block_ids(RUNNABLE))
def test_blocks_run(page, title, code):
    """All blocks without an ellipsis."""
    with jax.numpy_rank_promotion("allow"):
        exec(compile(code, label(page), "exec"), dict(GIVEN))


# Formulas

FORMULA = re.compile(r"^```math\n(.*?)^```$|\$`([^`\n]+)`\$", re.M | re.S)
FORMULAS = [(page, block or inline) for page in PAGES for block, inline in FORMULA.findall(read(page))]


def test_pages_have_formulas():
    assert {"docs/losses.md", "docs/advantages.md"} <= {label(page) for page, _ in FORMULAS}


@pytest.mark.parametrize(("page", "formula"), FORMULAS, ids=block_ids([(page, "", "") for page, _ in FORMULAS]))
def test_a_formula_is_typeset(page, formula):
    """docs/site_hooks.py converts it with latex2mathml, which shows a command that it does not know as its source."""
    assert "\\" not in convert(formula) and not re.search(r">[&_^]<", convert(formula)), formula


# Files of the tutorials

TINY = [
    *("model.hidden_size=16", "model.num_hidden_layers=1", "model.num_experts=0", "model.intermediate_size=16"),
    *("sampling.prompts=8", "sampling.group=2", "schedule.steps=2", "schedule.minibatches=2"),
    *("schedule.eval_every=0", "schedule.checkpoint_every=0", "evaluation.problems=8", "warm_start=null"),
]


def write_chat_tokenizer(folder):
    """A tokenizer of bytes with a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}<end>{% endfor %}"
    template += "{% if not enable_thinking %}<think></think>{% endif %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_gsm8k(folder):
    """Parquet files in the form of verl's data preparation."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    folder.mkdir()
    for split in ("train", "test"):
        messages = [[{"role": "user", "content": f"{split}: what is {n} + 1? Answer after ####."}] for n in range(1, 9)]
        answers = [{"style": "rule", "ground_truth": str(n + 1)} for n in range(1, 9)]
        parquet.write_table(arrow.table({"prompt": messages, "reward_model": answers}), folder / f"{split}.parquet")


def from_the_hub(*names, **settings):
    """Stands in for `data.huggingface`: rows as those of NuminaMath-TIR, after a check of the arguments."""
    inspect.signature(huggingface).bind(*names, **settings)
    rows = [{"problem": f"What is {n} + 1?", "solution": f"It is \\boxed{{{n + 1}}}."} for n in range(99)]
    own = {name: value for name, value in settings.items() if name not in ("split", "heldout")}
    return data.sequence(rows, **own)


@pytest.fixture(scope="session")
def tutorial_files(tmp_path_factory):
    """A folder with the files of all tutorials, which may import one another."""
    folder = tmp_path_factory.mktemp("tutorials")
    (folder / "experiments").symlink_to(ROOT / "experiments")
    write_gsm8k(folder / "gsm8k")
    for checkpoint in ("checkpoints/qwen25_3b", "checkpoints/qwen3_06b", ".cache/smollm2"):
        (folder / checkpoint).mkdir(parents=True)
        write_chat_tokenizer(folder / checkpoint)
        (folder / checkpoint / "config.json").write_text(json.dumps(to_json(presets.qwen3_0_6b)))
    for title, code in FILES.items():
        (folder / title).write_text(code, encoding="utf-8")
    with contextlib.chdir(folder):
        for title in sorted(FILES.keys() - EXPERIMENTS):
            exec(compile(FILES[title], title, "exec"), {})
    return folder


def need_client(title):
    """Skip a test of a file that imports OpenAI's client where that is not installed."""
    if "from openai import" in FILES.get(title, ""):
        pytest.importorskip("openai", reason="the client `openai` is not installed")


@pytest.mark.parametrize("title", sorted(EXPERIMENTS))
def test_a_file_of_a_tutorial_is_a_valid_experiment(title, tutorial_files, monkeypatch):
    need_client(title)
    monkeypatch.chdir(tutorial_files)
    monkeypatch.setattr(data, "huggingface", from_the_hub)
    assert experiments.validate(experiments.load(tutorial_files / title)) == []


@pytest.mark.parametrize("title", ["from_verl.py", "from_trl.py"])
def test_a_translated_file_has_a_plan_and_its_rewards_are_right(title, tutorial_files, monkeypatch, capsys):
    monkeypatch.chdir(tutorial_files)
    monkeypatch.setattr(data, "huggingface", from_the_hub)
    assert program.main(["train", title, "--dry-run", "--devices", "8"]) == 0
    assert "warning" not in capsys.readouterr().err
    experiment = experiments.load(tutorial_files / title)
    problem = experiment.data.train(0)
    answer = problem.answer.replace("It is \\boxed{", "").replace("}.", "")
    for text in (f"#### {answer}", f"<think>\nhm\n</think>\n\\boxed{{{answer}}}"):
        right, wrong = (experiment.reward(problem, each).value for each in (text, text.replace(answer, "0")))
        assert right - wrong == (("####" in text) == (title == "from_verl.py"))


def test_the_tutorials_train(tutorial_files, tmp_path, monkeypatch):
    """The tutorials' loss on the tutorials' task: two steps of a smaller model, which the task then evaluates."""
    monkeypatch.chdir(tutorial_files)
    with few_devices(1), jax.numpy_rank_promotion("allow"):  # as outside the tests
        assert program.main(["train", "spo.py", "--workdir", str(tmp_path / "run"), *TINY]) == 0
    evaluated = tmp_path / "run" / "evaluations" / "step_000002" / "reverse.jsonl"
    assert len(evaluated.read_text().splitlines()) == 128 * 8
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len([row for row in rows if "policy/ratio_mean" in row]) == 2


def test_the_environment_of_the_page_trains(tutorial_files, tmp_path, monkeypatch):
    """Two steps of a smaller model, after a warm start on conversations."""
    monkeypatch.chdir(tutorial_files)
    smaller = [*TINY[:-1], "warm_start.steps=2", "warm_start.rows=8", "optimizer.learning_rate=1e-3"]
    with few_devices(1), jax.numpy_rank_promotion("allow"):
        assert program.main(["train", "higher_lower.py", "--workdir", str(tmp_path / "run"), *smaller]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    turns = [row["rollout/turns"] for row in rows if "rollout/turns" in row]
    assert len(turns) == 2 and all(1 <= each <= 7 for each in turns)


# Commands


def commands(page):
    """The `gspax …` commands of a page: fenced or indented lines with backslash continuations, and code spans."""
    text = re.sub(r"[ ]*\\\n\s*", " ", read(page))
    lines = [
        line.strip().removeprefix("$ ") for line in text.splitlines() if line.startswith(("    ", "gspax ", "$ gspax "))
    ]
    lines += [span for span in spans(page) if span.startswith("gspax ")]
    for line in lines:
        line = re.sub(r"\s+# .*|\s*\((on every host|and so on)\)$", "", line)
        line = re.sub(r"\[(--[^\]]+)\]", r"\1", line)  # an option in brackets may be left out
        if re.match(r"gspax [a-z-]+ [^ ]*[-/.A-Z]", line) and "…" not in line and " | " not in line:
            yield line


COMMANDS = sorted({(page, line) for page in PAGES if page.name != "LOG.md" for line in commands(page)})


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{label(page)}: {line}" for page, line in COMMANDS])
def test_commands_parse(page, line, tutorial_files, capsys, monkeypatch):
    """The options belong to the subcommand, the file exists and the overrides set its fields."""
    monkeypatch.chdir(tutorial_files)
    name, *arguments = shlex.split(line)[1:]
    if arguments in ([], ["--help"]):
        assert name in program.SUBCOMMANDS
        return
    options = (
        importlib.import_module(f"gspax.{program.SUBCOMMANDS[name][0]}.{name.replace('-', '_')}")
        .make_parser()
        .parse_intermixed_args(arguments)
    )
    # a checkpoint, or another library's configuration, has no overrides here
    if "overrides" in options and not (getattr(options, "source", None) or getattr(options, "library", None)):
        need_client(options.file)
        path = SORT if options.file == "FILE" else tutorial_files / options.file
        path = path if path.exists() else ROOT / options.file
        assert path.exists(), options.file
        overridden = experiments.override(experiments.load(path), options.overrides)
        # what these read is not part of the repository: a data set, a checkpoint that is trained first
        if "FILE" not in line and not path.stem.startswith(("gsm8k", "word_problems")):
            assert experiments.validate(overridden) == []


OVERRIDES = re.findall(
    r"`((?:[a-z_]+(?:\.[a-z_]+)*=[\w.-]+ ?)+)`",
    "\n".join(
        line.split("|")[2]
        for line in read(ROOT / "docs" / "howto" / "coming_from.md").splitlines()
        if line.startswith("| `")
    ),
)


@pytest.mark.parametrize("assignments", sorted(set(OVERRIDES)))
def test_the_fields_for_names_of_other_libraries_exist(assignments):
    """Each override in the page's second column gives a valid experiment."""
    assert experiments.validate(experiments.override(experiments.load(SORT), assignments.split())) == []


def named_keys(section):
    """The names in the first column of a table of the page; `.top_p` has the parent of the name before it."""
    page = read(ROOT / "docs" / "howto" / "coming_from.md")
    lines = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0].splitlines()
    found = []
    for line in lines:
        for span in re.findall(r"`([^`]+)`", line.split("|")[1]) if line.startswith("| `") else ():
            name = span.partition("=")[0]
            found.append(f"{found[-1].rpartition('.')[0]}{name}" if re.match(r"\.\w", name) else name)
    return {name.replace("...", "actor_rollout_ref.actor.") for name in found}


PEERS = json.loads((Path(__file__).parent / "peer_keys.json").read_text())  # names only, and where they were read


def test_the_defaults_that_differ_from_those_of_other_libraries_are_those_of_the_code():
    """The column of gspax in "Not set, but not the same"."""
    optimizer, fields = (
        config.Optimizer(),
        {field.name: field.default for field in dataclasses.fields(config.Experiment)},
    )
    assert optimizer.transform is optimizers.adamw
    assert config.Regularizers().load_balance == 0.0
    values = {
        "Adam's b2": keywords(optimizers.adamw)["b2"],
        "weight decay": keywords(optimizers.adamw)["weight_decay"],
        "learning rate": optimizer.schedule.__name__,
        "eps beside the group's standard deviation": keywords(advantages.standardize)["eps"],
        "upper clip of GRPO": keywords(losses.grpo)["clip_high"],
        "load balance of experts": "off",
        "dropout of LoRA": "dropout" if "dropout" in vars(config.Lora()) else "none",
        "denominator of the ratio": f"the {fields['old_logp']}'s log-probs",
    }
    table = (
        read(ROOT / "docs" / "howto" / "coming_from.md")
        .partition("## Not set, but not the same")[2]
        .partition("\n## ")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    shown = {name: value for name, value, *_ in rows[2:]}
    assert {name: type(values[name])(value) for name, value in shown.items()} == values


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer['section']}: {Path(peer['file']).name}")
def test_the_page_has_every_key_of_the_examples_of_other_libraries(peer):
    """A row may name several keys by a pattern; the page says which version of the file it has."""
    patterns = named_keys(peer["section"])
    assert patterns and not [key for key in peer["keys"] if not any(fnmatchcase(key, each) for each in patterns)]
    assert peer.get("version") or peer["commit"][:8] in read(ROOT / "docs" / "howto" / "coming_from.md")


def test_a_row_whose_value_means_something_else_says_so():
    """The remarks that keep a translated configuration the same experiment."""
    bold = re.findall(r"\*\*([^*]+)\*\*", read(ROOT / "docs" / "howto" / "coming_from.md"))
    for words in ("GSPO becomes GRPO", "max_completion_length", "counts rollouts", "pulls toward nothing", "+1 and -1"):
        assert any(words in each for each in bold), words


def test_the_range_over_seeds_is_that_of_the_table():
    table, page = (read(ROOT / name) for name in ("experiments/README.md", "docs/tutorials/first_run.md"))
    row = next(line for line in table.splitlines() if re.match(r"\| `sort_gspo.py` \| 0\.\d+ \|", line))
    values = [float(cell) for cell in re.findall(r"\b0\.\d{3}\b", row)]
    assert len(values) == 20 and f"from {min(values):.3f} to {max(values):.3f}" in " ".join(page.split())


def test_the_table_of_devices_is_what_its_script_writes():
    sizes = runpy.run_path(str(ROOT / "experiments" / "benchmarks" / "sizes.py"))
    assert f"{sizes['BEGIN']}\n{sizes['table']()}\n{sizes['END']}" in sizes["PAGE"].read_text(encoding="utf-8")


def test_the_page_of_vllm_uninstalls_what_the_makefile_uninstalls():
    page, makefile = (read(ROOT / name) for name in ("docs/howto/sample_with_vllm.md", "Makefile"))
    (ours,), (theirs,) = (re.findall(r"pip uninstall --yes ([\w ]*\w)", text) for text in (makefile, page))
    assert ours == theirs


def test_there_are_commands():
    assert len(OVERRIDES) > 60
    assert len(COMMANDS) > 20
    assert len({line.split()[1] for _, line in COMMANDS}) == len(program.SUBCOMMANDS)


# The import graph


def test_the_picture_of_the_imports_is_up_to_date():
    path = ROOT / "docs" / "plot_architecture.py"
    spec = importlib.util.spec_from_file_location("plot_architecture", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8") == script.draw(), (
        f"run python {label(path)}"
    )
