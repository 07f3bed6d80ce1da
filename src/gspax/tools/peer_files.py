"""Reads the configurations of other libraries: YAML, shell scripts that start them, and Python files with a config.

A script is read, not run: assignments, `${NAME:-default}`, and arithmetic are evaluated, the first branch of a `case`
is taken, and what stands inside an `if` is left out, by name.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gspax.errors import UserError

CONFIG_CALLS = ("GRPOConfig", "ModelConfig", "LoraConfig")  # of Python files; keywords that are literals are read
TRAINER_CALLS = ("GRPOTrainer",)
_KEY = re.compile(r"[+~]*([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_DOTTED = re.compile(r"[+~]*\w+(\.\w+)+=")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
_ARITHMETIC = re.compile(r"\$\(\(([^$`]*?)\)\)(?!\))")
_COMMAND = re.compile(r"\$\((?!\()[^()]*\)|`[^`]*`")  # whose output is not known
_SUM = re.compile(r"[\d\s+*/().-]+")


class Settings(NamedTuple):
    """The settings of a file by their key, and the keys whose value depends on a condition of the script."""

    values: dict[str, Any]
    conditional: list[str]


def read_settings(path: Path) -> Settings:
    """Read a configuration. UserError if there is no such file, or nothing is set in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UserError(f"{path}: wanted a configuration to read: {problem}") from problem
    if path.suffix in (".yaml", ".yml", ".json"):
        found = Settings(dict(_flat(_load_yaml(path, text))), [])
    elif path.suffix == ".py":
        found = _read_python(path, text)
    else:
        found = _read_script(text)
    if not found.values:
        raise UserError(f"{path}: wanted settings (key=value, --key value, or YAML), found none")
    return found


def _load_yaml(path: Path, text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise UserError(f"{path}: wanted YAML: {' '.join(str(problem).split())}") from problem


def _flat(value: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by their dotted key; an empty mapping is a value."""
    if not isinstance(value, Mapping) or not value:
        if prefix:
            yield prefix, parse_value(value) if isinstance(value, str) else value
        return
    for key, inner in value.items():
        yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))


def parse_value(text: str) -> Any:
    """Return a setting's text as the number, truth value, list, or None that it writes; else the text."""
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("null", "none", ""):
        return None
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text.strip()


def _read_python(path: Path, text: str) -> Settings:
    """Read the literal keywords of configs, and the command line in the module's documentation."""
    try:
        tree = ast.parse(text)
    except SyntaxError as problem:
        raise UserError(f"{path}: wanted Python: {problem.msg} in line {problem.lineno}") from problem
    values = dict(_read_script(ast.get_docstring(tree) or "").values)
    unread = []
    for node in ast.walk(tree):
        name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            name = node.func.id
        if not isinstance(node, ast.Call) or name not in (*CONFIG_CALLS, *TRAINER_CALLS):
            continue
        for keyword in node.keywords:
            key = "lora." * (name == "LoraConfig") + (keyword.arg or "")
            try:
                values[key] = ast.literal_eval(keyword.value)
            except ValueError:
                if name not in TRAINER_CALLS or keyword.arg == "reward_funcs":
                    unread.append(key)
    return Settings({key: value for key, value in values.items() if key}, [key for key in unread if key])


def _read_script(text: str) -> Settings:
    """Read what a shell script passes to the program that it starts."""
    variables: dict[str, str] = {}
    values: dict[str, Any] = {}
    conditional: list[str] = []
    for line, is_conditional in _commands(text):
        words = _split(_expand(line, variables))
        assignments = [_KEY.fullmatch(word) for word in words]
        if words and all(assignments) and not line.startswith((" ", "\t", "(")):
            found = {match[1]: match[2] for match in assignments if match}
            if not is_conditional:
                variables |= found
            continue
        settings = dict(_settings(words))
        if is_conditional:
            conditional += settings
        else:
            values |= settings
    return Settings(values, [key for key in conditional if key not in values])


def _settings(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield the settings in the words of a command: `a.b=c`, `--key value`, `--key=value`, `--flag`."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if equals:
                yield name, parse_value(value)
                continue
            given = []
            while index < len(words) and not words[index].startswith("--") and not _DOTTED.match(words[index]):
                given.append(words[index].strip(","))
                index += 1
            plain = [each for each in given if not each.endswith(".py")]
            yield name, True if not plain else parse_value(plain[0]) if len(plain) == 1 else tuple(plain)
        elif match := _KEY.fullmatch(word):
            yield match[1], parse_value(match[2])


def _commands(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the commands of a script, each with whether it stands in an `if`.

    A list of an array is a command. Only the first branch of a `case` is there.
    """
    lines = iter(re.sub(r"\\\n", " ", text).splitlines())
    depth, branch = 0, 0  # of `if`; of `case`: 0 outside, 1 in the first branch, 2 in others
    for raw in lines:
        line = raw.split(" #")[0].rstrip()
        word = line.strip()
        if not word or word.startswith("#"):
            continue
        first = word.split()[0].rstrip(";")
        if first == "if":
            depth += 0 if re.search(r"\bfi;?$", word) else 1
        elif first == "fi":
            depth = max(depth - 1, 0)
        elif first == "case":
            branch = 1
        elif first == "esac":
            branch = 0
        elif word.endswith(";;"):
            branch = 2
        elif first in ("else", "elif", "then") or branch == 2 or re.fullmatch(r"[\w*|\"' -]+\)", word):
            continue
        elif array := re.match(r"\w+\+?=\((.*)", word):
            parts = [array[1]]
            while _is_open("".join(parts)) and (more := next(lines, None)) is not None:
                parts.append(more.split(" #")[0])
            yield f"( {' '.join(parts).rstrip().removesuffix(')')}", depth > 0
        else:
            yield word.removeprefix("export "), depth > 0


def _is_open(text: str) -> bool:
    """Return whether the parenthesis before a text is not closed in it."""
    return text.count(")") <= text.count("(")


def _expand(line: str, variables: Mapping[str, str]) -> str:
    """Replace variables that are known and arithmetic, the innermost first."""
    for _ in range(10):
        before = line
        line = _VARIABLE.sub(lambda match: _value_of(match, variables), line)
        line = _ARITHMETIC.sub(lambda match: _calculate(match, variables), line)
        if line == before:
            break
    return _COMMAND.sub("$(...)", line)


def _value_of(match: re.Match[str], variables: Mapping[str, str]) -> str:
    known = variables.get(match[1] or match[3])
    if known is None or (known == "" and match[2] is not None):
        return match[0] if match[2] is None else match[2]
    return known


def _calculate(match: re.Match[str], variables: Mapping[str, str]) -> str:
    text = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
    if not _SUM.fullmatch(text) or "**" in text:
        return match[0]
    try:
        return str(eval(text.replace("/", "//"), {"__builtins__": {}}))  # digits and operators alone
    except (SyntaxError, ZeroDivisionError, TypeError):
        return match[0]


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quotation mark that is not closed
        return line.split()
