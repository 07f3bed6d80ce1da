"""Write the table of chat templates of docs/parity.md: where turns end, and what the dry run says of conversations.

    python tests/chat_table.py

`tests/data/test_chat_template.py` fails if the page has another table. It takes seconds.
"""

import tempfile
from pathlib import Path

from chat_templates import PUBLISHED, write_folder

from gspax.data import hf_chat
from gspax.errors import UserError
from gspax.experiment.validation.chats import chat_problems, chat_warnings
from gspax.rewards.environments import Step, ToolUse, calculator
from gspax.rewards.environments.family_calls import PARSERS

PAGE = Path(__file__).parents[1] / "docs" / "parity.md"
BEGIN, END = "<!-- begin table of chat templates -->\n", "<!-- end table of chat templates -->\n"
HEAD = (
    "template",
    "families",
    "thinking",
    "last turn",
    "before a user",
    "before a tool",
    "opens",
    "user",
    "tools",
    "read",
)
TOOLS = ToolUse((calculator(),))


class Talk:
    """An environment that answers as a user."""

    def reset(self, problem):
        return None, [{"role": "user", "content": "1 + 1?"}]

    def step(self, state, message):
        return Step(state, [{"role": "user", "content": "And?"}])


def code(text):
    return f"`{text}`".replace("|", "\\|") if text else "nothing"


def end_before(tokenizer, role):
    try:
        return code(tokenizer.template.reply([{"role": role, "content": "2"}])[0])
    except UserError:
        return "none"


def says(tokenizer, environment):
    """What the dry run says of an environment."""
    if any(chat_problems(tokenizer, environment)):
        return "refused"
    return "warns" if any(chat_warnings(tokenizer, environment)) else "accepted"


def with_tools(tokenizer):
    """The environment with the first parser that reads the template's calls; with Hermes's if it writes none."""
    for environment in (ToolUse((calculator(),), parse=parse) for parse in PARSERS):
        if not any("environment.parse" in told for told in chat_warnings(tokenizer, environment)):
            return environment
    return TOOLS


def cells(name, folder):
    published = PUBLISHED[name]
    tokenizer = hf_chat(folder, thinking=published.thinking, date=published.date)
    ends = [code(tokenizer.template.end), *(end_before(tokenizer, role) for role in ("user", "tool"))]
    tools = with_tools(tokenizer)
    parse = "" if tools.parse is TOOLS.parse else f" with `{tools.parse.__name__}`"
    said = [says(tokenizer, Talk()), says(tokenizer, tools) + parse]
    opening = code(tokenizer.template.opening.strip())
    thinking = "on" if published.thinking else "off"
    return [
        name.removesuffix(", thinking"),
        published.families,
        thinking,
        *ends,
        opening,
        *said,
        published.source,
    ]


def table(folders):
    """The table; `folders` has that of each template."""
    rows = (HEAD, ["---"] * len(HEAD), *(cells(name, folder) for name, folder in folders.items()))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def written():
    """The page before its table, the table, and the page after it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, inside, after


def main():
    with tempfile.TemporaryDirectory() as parent:
        folders = {}
        for i, (name, published) in enumerate(PUBLISHED.items()):
            (folder := Path(parent) / str(i)).mkdir()
            folders[name] = write_folder(folder, published)
        made = table(folders)
    before, _, after = written()
    PAGE.write_text(f"{before}{BEGIN}{made}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
