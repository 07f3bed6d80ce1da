"""The budgets and layers in the table of docs/architecture.md, and the hygiene of the files.

There are no exemptions: split a module that does not fit, or change the document first.
"""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SOURCE / "gspax").rglob("*.py"))
}
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.py"))
BUDGETED = [*FILES.values(), *EXPERIMENTS]

# The only packages that these modules may import besides the standard library and gspax.
# Pure modules and their submodules import no other gspax module. `pip install gspax` installs only jax and numpy.
PURE = {"gspax.losses", "gspax.advantages"}
LIGHT = ["gspax", *sorted(PURE)]
# These load before any accelerator code.
DECLARATIVE = ["gspax.config", "gspax.hf", "gspax.model.presets", "gspax.hf.config_json"]
ACCELERATOR = {"jax", "jaxlib", "flax", "optax", "orbax"}

MACHINE_PATH = re.compile(r"(?<![\w.$}~-])/(?:home|root|tmp|work|Users)/\w")


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def label(path):
    return path.relative_to(ROOT).as_posix()


# Imports


def target(base, name):
    """The module that `from base import name` imports: base.name if it exists, else base."""
    return f"{base}.{name}" if f"{base}.{name}" in FILES else base


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def nodes(node, *, functions):
    """All nodes but those for the type checker, with or without the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if not functions and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield child
        yield from nodes(child, functions=functions)


@functools.cache
def imports(module, *, functions=True):
    """The dotted names that a module imports; with `functions=False`, only those imported when it loads."""
    found = set()
    for node in nodes(tree(FILES[module]), functions=functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{label(FILES[module])}:{node.lineno}: relative import; write gspax. in full"
            found |= {target(node.module, alias.name) for alias in node.names}
    return found


def own(module):
    """The gspax modules that a module imports, also in functions."""
    return {name for name in imports(module) if name.split(".")[0] == "gspax"}


def packages(module):
    parts = module.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts) + 1)}


def outside_after_import(module):
    """The top-level packages outside gspax that gspax files import when `module` is imported."""
    seen, queue, outside = set(), packages(module), set()
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        for other in imports(name, functions=False):
            if other.split(".")[0] == "gspax":
                queue |= packages(other)
            else:
                outside.add(other.split(".")[0])
    return outside


def find_cycle(graph):
    """The nodes of one cycle of a directed graph, or None."""
    done, path = set(), []

    def visit(node):
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return None
        path.append(node)
        for other in sorted(graph.get(node, ())):
            if cycle := visit(other):
                return cycle
        done.add(path.pop())
        return None

    return next(filter(None, map(visit, sorted(graph))), None)


def test_no_import_cycle():
    cycle = find_cycle({module: own(module) - {module} for module in FILES})
    assert cycle is None, " -> ".join(cycle)


def test_the_search_finds_a_cycle():
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}}) is None


def node(module):
    """The package or flat module in src/gspax that a module belongs to."""
    return module.split(".")[1]


def test_the_graph_of_packages_is_small_and_has_no_cycle():
    modules = [module for module in FILES if "." in module and module != "gspax.__main__"]
    graph = {node(module): set() for module in modules}
    for module in modules:
        graph[node(module)] |= {node(other) for other in own(module) if "." in other} - {node(module)}
    assert len(graph) <= 23, sorted(graph)
    cycle = find_cycle(graph)
    assert cycle is None, " -> ".join(cycle)


UNSTABLE = ("jax.experimental", "jax._src")


def unstable_names(path):
    """The names from unstable parts of jax that a file uses, by import or by attribute."""
    for each in ast.walk(tree(path)):
        if isinstance(each, ast.Import):
            names = [alias.name for alias in each.names]
        elif isinstance(each, ast.ImportFrom):
            names = [f"{each.module}.{alias.name}" for alias in each.names]
        elif isinstance(each, ast.Attribute):
            names = [ast.unparse(each)]
        else:
            continue
        yield from (name for name in names if (name + ".").startswith(tuple(part + "." for part in UNSTABLE)))


def test_one_module_uses_the_unstable_parts_of_jax():
    users = {module: sorted(set(unstable_names(path))) for module, path in FILES.items()}
    assert users.pop("gspax.unstable"), "gspax.unstable uses none: the search is broken or the module can go"
    assert not any(users.values()), {module: names for module, names in users.items() if names}


@pytest.mark.parametrize("package", sorted(PURE))
def test_losses_masked_and_advantages_need_jax_and_numpy_only(package):
    allowed = {"jax", "numpy", *sys.stdlib_module_names}
    for module in FILES:
        if not (module + ".").startswith(package + "."):
            continue
        for name in imports(module):
            pure = any((name + ".").startswith(other + ".") for other in PURE)
            assert pure or name.split(".")[0] in allowed, f"{module} imports {name}"


@pytest.mark.parametrize("module", LIGHT)
def test_the_losses_can_be_imported_with_jax_alone(module):
    extra = outside_after_import(module) - {"jax", "numpy", "gspax", *sys.stdlib_module_names}
    assert not extra, f"import {module} loads {sorted(extra)}"


@pytest.mark.parametrize("module", DECLARATIVE)
def test_the_configuration_loads_no_accelerator_code(module):
    loaded = outside_after_import(module) & ACCELERATOR
    assert not loaded, f"import {module} loads {sorted(loaded)}"


# Layers


def read_layers():
    """{path under src/gspax as in the document: layer}."""
    layers = {}
    for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and cells[0].isdigit():
            layers |= dict.fromkeys(re.findall(r"`([\w/]+(?:\.py|/))`", cells[1]), int(cells[0]))
    return layers


def layer(module):
    """The layer in a module's row or else in that of its nearest parent folder; None without either."""
    layers = read_layers()
    parts = module.split(".")[1:]
    rows = ["/".join(parts) + ".py", *("/".join(parts[:i]) + "/" for i in range(len(parts), 0, -1))]
    return next((layers[row] for row in rows if row in layers), None)


def test_the_table_of_layers_is_parsed():
    layers = read_layers()
    assert set(range(11)) == set(layers.values())
    assert layers["types.py"] == 0 and layers["losses/"] == 1 and layers["tools/"] == 10
    assert (layer("gspax.config"), layer("gspax.model.moe"), layer("gspax.losses")) == (0, 2, 1)


def test_every_module_has_a_layer():
    homeless = [module for module in FILES if module not in ("gspax", "gspax.__main__") and layer(module) is None]
    assert not homeless, f"add to the table in docs/architecture.md: {homeless}"


def test_every_row_of_the_table_is_a_file_or_folder():
    gone = [name for name in read_layers() if not (SOURCE / "gspax" / name).exists()]
    assert not gone, f"remove from the table in docs/architecture.md: {gone}"


def test_nothing_imports_a_higher_layer():
    wrong = [
        f"{module} (layer {layer(module)}) imports {other} (layer {layer(other)})"
        for module in FILES
        for other in own(module)
        if None not in (layer(module), layer(other)) and layer(other) > layer(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_tools():
    """The program finds a tool by its name, when it is called."""
    inside = {module for module in FILES if (module + ".").startswith("gspax.tools.")}
    assert inside
    wrong = {module: sorted(own(module) & inside) for module in FILES.keys() - inside if own(module) & inside}
    assert not wrong, wrong
    assert {label(path) for module, path in FILES.items() if "gspax.tools" in path.read_text(encoding="utf-8")} <= {
        "src/gspax/commands/main.py",
        *(label(FILES[module]) for module in inside),
    }


# Arguments


def takes_experiment(node):
    """Whether a function has a parameter that is a whole `Experiment`."""
    arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    names = [ast.unparse(each.annotation).strip("\"'") for each in arguments if each.annotation is not None]
    return any(name.split(".")[-1] == "Experiment" for name in names)


def test_few_functions_take_a_whole_experiment():
    functions = [
        f"{label(path)}: {node.name}"
        for path in FILES.values()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and takes_experiment(node)
    ]
    assert 0 < len(functions) <= 25, "\n".join(functions)


# Budgets


def lines(node):
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return node.end_lineno - first + 1


def positional(function, *, method):
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return names[1:] if method and names[:1] in (["self"], ["cls"]) else names


# Their functions have four arrays, the settings of a paper, and the keywords that all losses take.
LOSSES = {"gspo_family", "grpo_family", "sampler_family"}
LONG_CLASSES = {"ServerSampler": 250}  # it owns the threads and the newest push, which sampling and pushing share


def over_budget(path):
    """Messages about what in a file is too large."""
    found = []
    length = len(path.read_text(encoding="utf-8").splitlines())
    if length > 600:
        found.append(f"{label(path)}: {length} lines, more than 600")
    methods = {id(item) for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef) for item in node.body}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef) and lines(node) > (most := LONG_CLASSES.get(node.name, 150)):
            found.append(f"{label(path)}:{node.lineno}: class {node.name} has {lines(node)} lines, more than {most}")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if lines(node) > 60:
                found.append(f"{label(path)}:{node.lineno}: {node.name} has {lines(node)} lines, more than 60")
            names = positional(node, method=id(node) in methods)
            if len(names) > 6:
                found.append(
                    f"{label(path)}:{node.lineno}: {node.name} takes {len(names)} positional parameters: {names}"
                )
            every = [*names, *(argument.arg for argument in node.args.kwonlyargs)]
            if len(every) > 8 and path.stem not in LOSSES:
                found.append(f"{label(path)}:{node.lineno}: {node.name} takes {len(every)} parameters: {every}")
    return found


@pytest.mark.parametrize("path", BUDGETED, ids=label)
def test_every_file_is_within_the_budgets(path):
    assert not over_budget(path), "\n".join(over_budget(path))


# Hygiene


def tracked_files():
    """The files of the repository, including untracked ones; without git, all files but caches."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        skipped = (".git", ".venv", ".cache", "__pycache__", "runs", "build", "dist", "site")
        return [
            path
            for path in ROOT.rglob("*")
            if path.is_file() and not any(part.startswith(skipped) for part in path.relative_to(ROOT).parts)
        ]
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_test_files_have_unique_names():
    """The test folders are no packages: pytest cannot import two modules of one name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_the_list_of_costly_tests_names_tests_that_exist():
    """A test that was renamed runs with `make test` until `make costs` has measured it."""
    lines = (ROOT / "tests" / "costly.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 100 and lines == sorted({*lines}, key=str.encode)
    for line in lines:
        path, name = line.split("[")[0].split("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), line


def test_warnings_go_through_one_function():
    found = [label(path) for path in FILES.values() if "gspax: warning" in path.read_text(encoding="utf-8")]
    assert found == ["src/gspax/errors.py"]


def test_the_random_streams_of_a_run_know_of_each_other():
    """A number that is folded into a key names its stream (`types.Stream`), so that no two modules draw the same."""
    folds = [
        (label(path), node.args[1])
        for path in FILES.values()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fold_in"
    ]
    assert folds and not [place for place, number in folds if isinstance(number, ast.Constant)]
    assert not [place for place, number in folds if isinstance(number, ast.Name) and number.id.isupper()]


def test_output_goes_through_one_function():
    """It escapes what others wrote. The exceptions write JSON for programs, or have nothing of others."""
    exceptions = (
        "rewards/workers/worker.py",
        "data/template_child.py",
        "tools/samples.py",
        "tools/doctor/__init__.py",
    )
    raw = {
        label(path)
        for path in FILES.values()
        if any(isinstance(node, ast.Name) and node.id == "print" for node in ast.walk(tree(path)))
    }
    assert raw - {f"src/gspax/{name}" for name in exceptions} == {"src/gspax/errors.py"}


def test_no_file_contains_an_absolute_path_of_a_machine():
    files = tracked_files()
    assert Path(__file__) in files
    wrong = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not a text file
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line):
                wrong.append(f"{label(path)}:{number}: {line.strip()[:120]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", ["home", "root", "tmp", "work", "Users"])
def test_the_pattern_matches_absolute_paths_of_machines(folder):
    assert MACHINE_PATH.search(f"see /{folder}/anna/run")
    assert MACHINE_PATH.search(f'"/{folder}/run"')
    for fine in (
        f"https://example.org/{folder}/x",
        f"~/{folder}/x",
        f"./{folder}/x",
        f"$HOME/{folder}/x",
        f"a/{folder}/x",
    ):
        assert not MACHINE_PATH.search(fine), fine
