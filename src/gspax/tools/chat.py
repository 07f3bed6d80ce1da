"""Implements `gspax chat`: talk to the policy of a run, or to a published model, in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

from gspax.commands.arguments import Parser, add_source, at_least, load_file, subcommand_parser
from gspax.errors import UserError, printable, tell
from gspax.tools.policy import load_source, with_temperature

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gspax.config import Sampling
    from gspax.config.protocols import Tokenizer
    from gspax.tools.dialogue import Dialogue
    from gspax.tools.prompt_form import Form

QUOTES = '"""'
HELP = (
    "/temperature T, /logps (log-probs of each token, on or off), /template (the run's form of prompts: off, or N), "
    f"/reset, /quit; {QUOTES} before and after a message of several lines; Ctrl-C stops an answer"
)


def make_parser() -> Parser:
    parser = subcommand_parser(
        "chat",
        "Talk to the policy of a run, or to a published model. With a chat tokenizer messages continue a conversation; "
        "with another one every line is a prompt. Without a terminal, lines of standard input are messages.",
        "gspax chat runs/sort --beside runs/sort/warm_start\n  echo 3142= | gspax chat runs/sort@125 --temperature 0",
    )
    add_source(parser)
    parser.add_argument("--beside", metavar="SOURCE", help="a second source, which answers the same messages")
    parser.add_argument(
        "--file", metavar="FILE", help="the run's experiment file, if its tokenizer or environment is your own class"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="seed of the answers (default: 0)")
    parser.add_argument("--temperature", metavar="T", help="0 for greedy decoding (default: the source's)")
    parser.add_argument("--max-tokens", type=at_least(1), default=1024, metavar="N", help="limit of an answer (1024)")
    parser.add_argument(
        "--context", type=at_least(2), metavar="N", help="limit of a conversation in tokens (default: at most 4096)"
    )
    return parser


def execute(options: argparse.Namespace) -> int:
    from gspax.tools.terminal import make_console

    console, interactive = make_console(), sys.stdin is not None and sys.stdin.isatty()
    names = [options.source, *([options.beside] if options.beside else [])]
    with console.status(f"loading {' and '.join(names)}") if interactive else contextlib.nullcontext():
        chat = Chat(console, [open_talk(name, options) for name in names], options.max_tokens)
    if interactive:
        console.print(HELP, style="dim")
    for talk in chat.talks:
        if talk.forms:
            talk.tell_form()
    for message in read_messages(interactive):
        if message == "/quit":
            break
        try:
            (chat.set if isinstance(message, Line) and message.startswith("/") else chat.answer)(message)
        except UserError as problem:
            if not interactive:
                raise
            tell(str(problem))
    return 0


class Line(str):
    """A message of one line, which may be a command."""


def read_messages(interactive: bool) -> Iterator[str]:
    """Yield typed messages, or messages from standard input, without empty ones. UserError if quotes stay open."""
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (it gives `input` a history)

    lines = _typed() if interactive else (line.rstrip("\r\n") for line in sys.stdin or ())
    for line in lines:
        if line.startswith(QUOTES):
            yield from filter(None, [_quoted(line.removeprefix(QUOTES), lines)])
        else:
            yield from filter(None, [Line(line.strip() if interactive else line)])


def _typed() -> Iterator[str]:
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ")


def _quoted(first: str, lines: Iterator[str]) -> str:
    """Return the text up to the quotes that end it, without the line breaks next to the quotes."""
    parts = [first]
    while not parts[-1].endswith(QUOTES):
        if (line := next(lines, None)) is None:
            raise UserError(f"wanted {QUOTES} after a message that begins with it, got the end of the input")
        parts.append(line)
    return "\n".join(parts).removesuffix(QUOTES).removeprefix("\n").removesuffix("\n")


@dataclass
class Talk:
    """A policy that answers messages."""

    name: str
    dialogue: Dialogue
    tokenizer: Tokenizer
    sampling: Sampling  # only temperature and filters are used
    forms: Sequence[Form] = ()  # of the run's prompts; the first one is used at first
    form: Form | None = None  # the form in use; None: messages are prompts as they are

    def __post_init__(self) -> None:
        if self.forms:
            self.use(self.forms[0])

    def use(self, form: Form | None) -> None:
        """Begin a new conversation with a first prompt of this form, and use the form for later conversations."""
        self.form = form
        self.dialogue.reset()
        self.dialogue.encode = self.tokenizer.encode if form is None else partial(form.encode, self.tokenizer)
        self.dialogue.tools = () if form is None else form.tools

    def tell_form(self) -> None:
        """Print the form in which first messages are sent."""
        shown = "as they are" if self.form is None else str(self.form)
        several = f" (one of {len(self.forms)} forms: /template N)" if len(self.forms) > 1 else ""
        tell(f"{self.name}: first messages are sent {shown}{several}")

    def render(self, ids: list[int]) -> Text:
        """Decode the tokens of an answer, or of its beginning, to text."""
        from gspax.tools.terminal import dim_thinking

        return dim_thinking(self.tokenizer.decode(ids), opened=self.dialogue.opened)


@dataclass
class Chat:
    """A chat with one or two policies, and its display settings."""

    console: Console
    talks: list[Talk]
    limit: int  # tokens of an answer
    logps: bool = False

    def set(self, command: str) -> None:
        """Obey a line that begins with a slash. UserError if it is no command."""
        name, _, value = command.partition(" ")
        if name == "/temperature":
            for talk in self.talks:
                talk.sampling = with_temperature(talk.sampling, value)
        elif name == "/reset":
            for talk in self.talks:
                talk.dialogue.reset()
        elif name == "/template":
            for talk in self.talks:
                talk.use(chosen_form(talk, value))
                talk.tell_form()
        elif name == "/logps":
            self.logps = not self.logps
        else:
            raise UserError(f"wanted {HELP}; got {command!r}")

    def answer(self, message: str) -> None:
        """Show the answers to a message while they are sampled, and the log-probs of their tokens if wanted."""
        from rich.live import Live

        answers: list[list[int]] = [[] for _ in self.talks]
        asked = [talk.dialogue.ask(message, sampling=talk.sampling, limit=self.limit) for talk in self.talks]
        alone, printed = len(asked) == 1, 0
        live = None if alone or not self.console.is_terminal else Live(console=self.console, auto_refresh=False)
        with stopped_by_ctrl_c() as stopped, live or contextlib.nullcontext():
            for latest in zip_longest(*asked):
                answers = [new or old for new, old in zip(latest, answers, strict=True)]
                if live is not None:
                    live.update(self._columns(answers), refresh=True)
                elif alone:
                    printed = self._print_more(answers[0], printed)
                if stopped.is_set():
                    break
        if alone:
            self.console.print(self.talks[0].render(answers[0])[printed:].append("\n"), end="")
        for talk, ids in zip(self.talks, answers, strict=True):
            if not (alone or live):
                self.console.print(f"{talk.name}: ", talk.render(ids), sep="")
            if self.logps:
                self.console.print(("" if alone else f"{talk.name}: ") + describe_logps(talk, ids), style="dim")

    def _print_more(self, ids: list[int], printed: int) -> int:
        """Print an answer from character `printed` up to one that tokens may still complete; return its position."""
        text = self.talks[0].render(ids)
        end = len(text.plain.rstrip("\N{REPLACEMENT CHARACTER}"))
        self.console.print(text[printed:end], end="")
        return end

    def _columns(self, answers: Sequence[list[int]]) -> Table:
        from rich.table import Table

        table = Table(*[talk.name for talk in self.talks], expand=True)
        table.add_row(*[talk.render(ids) for talk, ids in zip(self.talks, answers, strict=True)])
        return table


def describe_logps(talk: Talk, ids: Sequence[int]) -> str:
    """Describe the tokens of the last answer with their log-probs, and the sum."""

    logps = talk.dialogue.logp()
    stops = talk.tokenizer.stop_ids
    pieces = [talk.tokenizer.decode([i]) or ("(stop)" if i in stops else "(special)") for i in ids]
    shown = [f"{printable(repr(piece)[1:-1])} {logp:z.2f}" for piece, logp in zip(pieces, logps, strict=True)]
    return f"{' | '.join(shown)}; {len(logps)} tokens, sum {sum(logps):z.2f}"


@contextlib.contextmanager
def stopped_by_ctrl_c() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets instead of ending the program: the current computation is finished first."""
    stopped = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def chosen_form(talk: Talk, value: str) -> Form | None:
    """Return the form with this number; without a number toggle between none and the first form."""
    if not value.strip():
        return None if talk.form is not None else next(iter(talk.forms), None)
    number = int(value) if re.fullmatch(r"\s*\d{1,9}\s*", value) else 0
    if not 1 <= number <= len(talk.forms):
        raise UserError(f"/template: wanted a number from 1 to {len(talk.forms)}, or none, got {value!r}")
    return talk.forms[number - 1]


def open_talk(name: str, options: argparse.Namespace) -> Talk:
    """Load the policy of a run or a checkpoint. UserError if there is none, or its tokenizer is not known."""
    import jax

    from gspax.sampler.sampler import make_options
    from gspax.tools.dialogue import Dialogue
    from gspax.tools.prompt_form import read_forms

    file = load_file(options.file) if options.file else None
    temperature = "own" if options.temperature is None else options.temperature
    policy = load_source(name, file.tokenizer if file else None, context=options.context or 0, temperature=temperature)
    forms = [] if policy.recorded is None else read_forms(policy.recorded, file and file.environment)
    settings = make_options(policy.model, policy.tokenizer, policy.sampling, policy.mesh)
    dialogue = Dialogue(policy.weights, policy.tokenizer, settings, jax.random.key(options.seed))
    return Talk(name, dialogue, policy.tokenizer, policy.sampling, forms)
