"""The program that renders chat templates, in a separate process with little memory (`data.templates`).

It writes one line of JSON for each line of JSON that it reads, and exits at the end of its input. It imports only
jinja2. Templates can use what transformers provides to them.
"""

import contextlib
import datetime
import functools
import json
import sys
from typing import Any

import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 2**30  # bytes of address space that the process may use; it starts with a tenth of it
LONGEST = 2**24  # characters of a rendered text, more than any model reads


class Generation(jinja2.ext.Extension):
    """The tag `{% generation %}`, which marks the assistant's text in training templates; renders only the text."""

    tags = {"generation"}  # noqa: RUF012  (as jinja declares it)

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        body: list[jinja2.nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without names that begin with an underscore."""

    def __setitem__(self, name: str, value: object) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")
        super().__setitem__(name, value)


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize a value as JSON, for the filter `tojson` of templates."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def reject(message: str) -> None:
    """Raise a TemplateError, for the function `raise_exception` of templates."""
    raise jinja2.exceptions.TemplateError(message)


@functools.lru_cache(maxsize=16)
def compile_template(text: str) -> jinja2.Template:
    """Compile a template in a sandbox with the filters and functions that transformers provides."""
    extensions = [Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": reject,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "namespace": Namespace,
    }
    return environment.from_string(text)


def answer(template: str, variables: dict[str, object]) -> dict[str, str]:
    """Render a template: returns {"text": ...}, or {"error": ...} if that fails."""
    try:
        text = compile_template(template).render(variables)
        if len(text) > LONGEST:
            return {"error": f"wanted at most {LONGEST} characters, got {len(text)}"}
        return {"text": text}
    except MemoryError:
        return {"error": f"wanted at most {MEMORY // 2**20} MiB of memory, it needs more"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:  # a template is a program and can fail in any way
        return {"error": " ".join(str(error)[:1000].split()) or type(error).__name__}


def main() -> None:
    """Limit the memory of this process, then answer requests from stdin until it is closed."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not every system has such a limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
