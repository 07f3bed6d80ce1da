"""Sandboxed programs: correct ones pass, and attacks on the grader earn nothing.

At most two programs run at a time, with little memory and few seconds.
"""

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from gspax.data import Problem
from gspax.errors import UserError
from gspax.experiment import describe
from gspax.rewards import code
from gspax.rewards.code import Limits, Sandbox
from gspax.rewards.program_tests import Tests
from gspax.rewards.scores import Grade, Result, to_result
from gspax.rewards.workers import pool as workers

EXPECTED = "918273645"  # the secret that an attack would have to find
LIMITS = Limits(timeout=20.0, memory=256, output=1, processes=8)
SHORT = Limits(timeout=1.0, memory=256, output=1, processes=8)


@pytest.fixture(params=["bubblewrap", "none"])
def isolation(request):
    return request.getfixturevalue("bubblewrap") if request.param == "bubblewrap" else "none"


@pytest.fixture
def bubblewrap():
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed (apt-get install bubblewrap)")
    return "bubblewrap"


def graded(program, isolation, *cases, function=None, limits=LIMITS):
    answer = Tests(cases or (("", EXPECTED),), function).to_answer()
    return code.grade(
        [answer], [program], allow_code_execution=True, sandbox=Sandbox(limits=limits, isolation=isolation)
    )[0]


def fenced(program):
    return f"Here it is:\n\n```python\n{program}\n```\n"


# Correct programs

READERS = [
    "print(int(sys.stdin.readline()) * gcd(4, 6))",
    "n = int(input())\nfor _ in repeat(None, 1):\n    print(datetime.timedelta(days=n).days * len(deque([1, 2])))",
    "def double(n):\n    return n and 2 + double(n - 1)\nprint(double(int(input()) + 3000) - 6000)",
    "pi = 2  # hides that of math\nprint(pow(int(input()), 1, 100) * pi)",
    "print(int(input()) * 2)",
    "import sys\nprint(int(sys.stdin.readline()) * 2)",
    "import sys\nprint(int(sys.stdin.buffer.readline()) * 2)",
    "import sys\nprint(int(sys.stdin.buffer.read()) * 2)",
    "import os\nos.write(1, b'%d' % (int(os.read(0, 100)) * 2))",
    "print(int(open(0).read()) * 2)\nexit()",
    "def main():\n    print(int(input()) * 2)\nif __name__ == '__main__':\n    main()",
    "import threading\nthread = threading.Thread(target=lambda: print(int(input()) * 2))\nthread.start()",
    "print(str(2 ** 20_000)[:0] + str(int(input()) * 2))",
    "from dataclasses import dataclass\n@dataclass\nclass A:\n    n: 'int'\nprint(A(int(input())).n * 2)",
]


@pytest.mark.parametrize("program", READERS)
def test_a_correct_program_passes(program, isolation):
    assert graded(program, isolation, ("21\n", "42\n")) == Grade(1.0, "passed")


FUNCTIONS = [
    "def total(numbers, start):\n    return sum(numbers) + start",
    "class Solution:\n    def total(self, numbers: List[int], start: int) -> int:\n        return sum(numbers) + start",
    "def total(numbers, start):\n    print('looking', flush=True)\n    return reduce(operator.add, numbers, start)",
    "def total(numbers, start):\n    return float(sum(numbers) + start)",
    "class Solution:\n    def total(self, numbers: Optional[List[int]], start):\n"
    "        return sum(copy.deepcopy(numbers)) + min(start, sys.maxsize)",
    "def down(n):\n    return n and 1 + down(n - 1)\n"
    "def total(numbers, start):\n    return sum(numbers) + start + down(3000) - 3000",
]


@pytest.mark.parametrize("program", FUNCTIONS)
def test_a_correct_function_passes(program, isolation):
    cases = (("[1, 2]\n3", "6"), ("[]\n\n-1\n", "-1"))
    assert graded(program, isolation, *cases, function="total") == Grade(1.0, "passed")


@pytest.mark.parametrize(
    ("program", "outcome", "detail"),
    [
        ("print(int(input()) + 21)", "wrong", "test 2"),
        ("print(int(input()) * 2 if True else", "error", "test 1: SyntaxError: '(' was never closed"),
        ("print(1 / (int(input()) - 21))", "error", "test 1: ZeroDivisionError: division by zero"),
        ("print(int(input()) * 2)\nraise SystemExit(3)", "error", "test 1: exit status 3"),
        ("", "no program", ""),
    ],
)
def test_a_grade_has_a_reason(program, outcome, detail, isolation):
    cases = (("21\n", "42\n"), ("1\n", "2\n"))
    assert graded(program, isolation, *cases) == Grade(0.0, outcome, detail)


def test_a_batch_is_graded_in_order(isolation):
    answers = [Tests((("", str(index)),)).to_answer() for index in range(4)]
    completions = [fenced("print(0)"), fenced("print(0)"), "```python\n\n```", fenced("print(3)")]
    grades = code.grade(
        answers, completions, allow_code_execution=True, sandbox=Sandbox(limits=LIMITS, isolation=isolation)
    )
    assert [grade.outcome for grade in grades] == ["passed", "wrong", "no program", "passed"]


# Attacks: each prints or returns the expected value if it succeeds.

FUNCTION_ATTACKS = {
    "equal to everything": "class A:\n    def __eq__(self, other):\n        return True\ndef f():\n    return A()",
    "equal to everything, an int": "class A(int):\n    __eq__ = lambda self, other: True\ndef f():\n    return A(1)",
    "frames": """
import gc, sys
def f():
    frame, seen = sys._getframe(), []
    while frame:
        seen += [*frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    texts = [repr(each) for each in (*seen, *gc.get_objects())]
    wanted = "".join(reversed("546372819"))
    return int(wanted) if any(wanted in text for text in texts) else 0
""",
    "no value": "import os\ndef f():\n    os._exit(0)",
    "exit": "def f():\n    exit()",
    "a result of its own": "import os\ndef f():\n    for n in range(3, 10):\n        try: os.write(n, b'1')\n"
    "        except OSError: pass\n    os._exit(0)",
    "two results": f"import os\ndef f():\n    for n in range(3, 10):\n        try: os.write(n, b'{EXPECTED} ')\n"
    f"        except OSError: pass\n    return {EXPECTED}",
}


@pytest.mark.parametrize("name", FUNCTION_ATTACKS)
def test_an_attack_from_inside_a_function_earns_nothing(name, bubblewrap):
    grade = graded(FUNCTION_ATTACKS[name], bubblewrap, ("", EXPECTED), function="f")
    assert grade.reward == 0.0 and grade.outcome in ("wrong", "error")


def test_a_reloaded_module_cannot_read_outside_files(bubblewrap, tmp_path):
    tmp_path.chmod(0o777)
    target = tmp_path / "written"
    program = f"""
import importlib, os
importlib.reload(os)
os.system("echo {EXPECTED} > {target}")
open({str(target)!r}, "w").write("x")
print({EXPECTED})
"""
    assert graded(program, bubblewrap).reward == 0.0
    assert not target.exists()


def test_a_child_does_not_outlive_its_program(bubblewrap):
    marker = f"3{os.getpid()}.5"
    program = f"""
import os
if os.fork() == 0:
    os.setsid()
    os.execv("/bin/sleep", ["sleep", "{marker}"])
import time
time.sleep(0.2)
print({EXPECTED})
"""
    grade = graded(program, bubblewrap)
    assert grade.outcome == "passed"
    deadline = time.monotonic() + 5
    while running(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(marker)


def test_a_program_ends_with_its_worker(isolation, monkeypatch):
    """Under "none" by its own timer, a second after its time limit."""
    name = f"p{os.getpid()}"
    program = f"import ctypes, time\nctypes.CDLL(None).prctl(15, b'{name}')\ntime.sleep(60)"  # PR_SET_NAME
    limits = Limits(timeout=6.0, memory=256, output=1, processes=8)
    monkeypatch.setattr(code, "_SPARE", 1.5 - limits.timeout)
    assert graded(program, isolation, limits=limits) == Grade(0.0, "late")
    deadline = time.monotonic() + 30
    while running(name, "comm") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(name, "comm")


def running(text, file="cmdline"):
    """Whether a process on this machine has this argument, or this name (`file="comm"`). Ended ones do not count."""
    for path in Path("/proc").glob(f"[0-9]*/{file}"):
        try:
            found = text.encode() in path.read_bytes().replace(b"\n", b"\0").split(b"\0")
            if found and b") Z " not in path.with_name("stat").read_bytes():  # Z: its parent has not waited for it yet
                return True
        except OSError:
            pass
    return False


def test_the_network_is_unreachable(bubblewrap):
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
import socket
socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 1)
print({EXPECTED})
"""
        assert graded(program, bubblewrap).outcome == "error"


def test_the_environment_is_empty(bubblewrap, monkeypatch):
    monkeypatch.setenv("GSPAX_SECRET", EXPECTED)
    monkeypatch.setattr(workers, "_shared", {})  # workers with this environment
    program = """
import os, glob
texts = [str(os.environ)]
for path in glob.glob("/proc/[0-9]*/environ"):
    try: texts.append(open(path).read())
    except OSError: pass
print(918273645 if any("GSPAX_SECRET" in text for text in texts) else 0)
"""
    assert graded(program, bubblewrap).outcome == "wrong"
    workers._close()


def test_outside_files_are_unreachable(bubblewrap, tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "answer").write_text(EXPECTED)
    for path in (tmp_path / "answer", Path(__file__), "/etc/passwd"):
        assert graded(f"print(open({str(path)!r}).read() and {EXPECTED})", "bubblewrap").outcome == "error"
    for folder in ("/", "/usr", "/dev", "/dev/shm", "/proc"):
        assert graded(f"open('{folder}/x', 'w').close()\nprint({EXPECTED})", "bubblewrap").outcome == "error"
    assert graded(f"open('x', 'w').close()\nprint({EXPECTED})", "bubblewrap").outcome == "passed"


FOREVER = {
    "alarm": "import signal\nsignal.alarm(0)\nwhile True: pass",
    "swallow": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "signals": "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
    "sleep": "import time\ntime.sleep(60)",
    "one long operation": "7 ** 10 ** 9",
    "thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
}


@pytest.mark.parametrize("name", FOREVER)
def test_an_endless_program_costs_only_its_timeout(name, isolation):
    graded("print(1)", isolation)  # starts a worker
    began = time.monotonic()
    grade = graded(f"{FOREVER[name]}\nprint({EXPECTED})", isolation, limits=SHORT)
    assert grade.reward == 0.0 and time.monotonic() - began < SHORT.timeout + 5
    assert grade.outcome == "timeout"


BOMBS = {
    "fork": "import os, time\nn = 0\nwhile n < 100:\n    if os.fork() == 0: time.sleep(60)\n    n += 1",
    "threads": "import threading, time\nfor _ in range(100):\n"
    "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "memory": "x = bytearray(1 << 30)",
    "output": "for _ in range(64): print('x' * (1 << 20))",
    "errors": "import sys\nfor _ in range(64): print('x' * (1 << 20), file=sys.stderr)",
    "large file": "open('x', 'wb').write(b'x' * (1 << 25))",
    "many files": "for n in range(64): open(str(n), 'wb').write(b'x' * (1 << 20))",
    "memory files": "import os\nfile = os.memfd_create('x')\nfor _ in range(2): os.write(file, b'x' * (1 << 20))",
    "namespaces": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
}


@pytest.mark.parametrize("name", BOMBS)
def test_resource_bombs_are_contained(name, bubblewrap):
    if name == "namespaces" and "--disable-userns" not in subprocess.getoutput("bwrap --help"):
        pytest.skip("this bubblewrap is older than 0.8")
    grade = graded(f"{BOMBS[name]}\nprint({EXPECTED})", bubblewrap, limits=Limits(5.0, 256, 1, 8))
    assert grade.reward == 0.0 and grade.outcome in ("error", "timeout")
    assert graded(f"print({EXPECTED})", bubblewrap).reward == 1.0


def test_a_persistent_fork_bomb_is_contained(bubblewrap):
    program = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert graded(program, bubblewrap, limits=Limits(1.0, 64, 1, 4)).outcome == "timeout"
    assert graded(f"print({EXPECTED})", bubblewrap).reward == 1.0


# Settings


@pytest.mark.parametrize("allowed", [{}, *({"allow_code_execution": value} for value in (False, None, "no", 1))])
def test_no_program_runs_unless_the_experiment_allows_it(allowed):
    """Any other value than True, however true it is for Python, allows nothing."""
    none = Sandbox(isolation="none")
    with pytest.raises(UserError, match="reward: wanted allow_code_execution=True"):
        code.reward(Problem("?", Tests((("", "1"),)).to_answer()), "print(1)", isolation="none", **allowed)
    with pytest.raises(UserError, match="run_program: wanted allow_code_execution=True"):
        code.run_program("print(1)", sandbox=none, **allowed)


def test_without_bubblewrap_it_does_not_start(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        UserError, match=r"^isolation: wanted the program bwrap \(apt-get install bubblewrap\), it is not installed$"
    ):
        graded("print(1)", "bubblewrap")


def test_limits_alone_are_no_isolation():
    """Programs that run as the trainer's user can read its memory and write into it."""
    with pytest.raises(UserError, match=r"^isolation: wanted bubblewrap or none, got 'limits'$"):
        graded("print(1)", "limits")


def test_a_sandbox_that_is_not_permitted_is_one_sentence(monkeypatch):
    """As where the kernel or a container refuses user namespaces."""
    sentence = (
        r"^rewards: isolation: wanted to run a program with 'bubblewrap', got exit status 1: bwrap: "
        r"no permission; the machine must permit user namespaces \(docs/rewards\.md, Programs\)$"
    )
    with tempfile.TemporaryDirectory() as folder:
        bwrap = Path(folder, "bwrap")
        bwrap.write_text("#!/bin/sh\necho 'bwrap: no permission' >&2\nexit 1\n")
        for path in (folder, bwrap):  # for the user nobody, too
            os.chmod(path, 0o755)
        monkeypatch.setenv("PATH", folder, prepend=os.pathsep)
        monkeypatch.setattr(workers, "_shared", {})
        with pytest.raises(UserError, match=sentence):
            graded("print(1)", "bubblewrap")


def test_programs_end_before_the_trainer_if_memory_runs_out(isolation):
    """System V shared memory is in no limit; it ends with the sandbox."""
    assert graded("print(open('/proc/self/oom_score_adj').read())", isolation, ("", "1000")).outcome == "passed"


def test_an_unavailable_interpreter_is_an_error(isolation):
    with pytest.raises(UserError, match=rf"rewards: isolation: wanted to run a program with '{isolation}', got "):
        code.grade(
            [Tests((("", "1"),)).to_answer()],
            ["1"],
            allow_code_execution=True,
            sandbox=Sandbox(isolation=isolation, python="/usr/bin/false"),
        )


def test_malformed_tests_cost_their_own_completion(isolation):
    answers = ["no tests", Tests((("", "1"),)).to_answer(), Tests(()).to_answer()]
    grades = code.grade(
        answers,
        ["print(1)"] * 3,
        allow_code_execution=True,
        sandbox=Sandbox(limits=LIMITS, isolation=isolation),
        failed=-0.5,
    )
    wanted = "answer: wanted the text of gspax.rewards.program_tests.Tests, got 'no tests'"
    assert grades[0] == Grade(-0.5, "raised", wanted) and grades[1].reward == 1.0
    assert to_result(grades[2].score) == Result((-0.5,), "raised: answer: wanted at least one test, got none")


def test_limits_must_be_positive():
    with pytest.raises(UserError, match=r"limits\.memory: wanted more than 0, got 0"):
        Limits(memory=0)


def test_the_reward_can_be_described():
    described = describe(partial(code.reward, allow_code_execution=True))
    assert described["function"] == "gspax.rewards.code.reward" and described["allow_code_execution"] is True
    assert described["limits"]["memory"] == 512 and described["isolation"] == "bubblewrap"


def test_a_batch_has_a_deadline(isolation):
    answers = [Tests((("", "1"),)).to_answer()] * 2
    grades = code.grade(
        answers,
        ["print(1)", "print(2)"],
        allow_code_execution=True,
        sandbox=Sandbox(isolation=isolation),
        batch_timeout=0.0,
    )
    assert [grade.outcome for grade in grades] == ["late", "late"]


def test_a_lost_worker_gives_the_failure_value(isolation, monkeypatch):
    monkeypatch.setattr(code._tally, "_counts", Counter())
    monkeypatch.setattr(code, "_SPARE", -20.0)
    reward = partial(code.reward, allow_code_execution=True, isolation=isolation, limits=LIMITS, failed=-0.5)
    problem = Problem("?", Tests((("", "1"),)).to_answer())
    assert to_result(reward(problem, "print(1)")) == Result((-0.5,), "late") and code.counts() == {"late": 1}


P = "import sys\nprint(int(input()) * 2)\n"
INDENTED = "   import sys\n   print(int(input()) * 2)\n"
FENCES = {
    "none": P,
    "prose before and after": f"a\n```python\n{P}```\nb",
    "the last of several": f"a\n```python\nx = 1\n```\nb\n```\n{P}```\n",
    "a lone closing one": f"{P}```\nThis doubles it.",
    "a lone closing one on the last line": f"{P.rstrip()}```",
    "a lone closing one before text": f"{P}``` This doubles it.",
    "text before it on its line": f"Here is the code: ```python\n{P}```\n",
    "bold text before it": f"**Solution:**```python\n{P}```",
    "a list item": f"1. ```python\n{INDENTED}   ```",
    "text in a list item": f"- Write it: ```python\n{INDENTED}  ```\n- Run it.",
    "a quotation": f"> ```python\n> {P.strip().replace(chr(10), chr(10) + '> ')}\n> ```",
    "indented": f"   ```python\n{INDENTED}   ```",
    "tildes": f"~~~python\n{P}~~~",
    "four backticks": f"````python\n{P}````\nok",
    "another name of the language": f"```Python3 \n{P}```",
    "attributes": f"```{{.python .numberLines}}\n{P}```",
    "a word that is no language": f"```code\n{P}```",
    "closing at the end of a line": f"```python\n{P.rstrip()}```",
    "text after the closing one": f"```python\n{P}``` That is it.",
    "a stop token's text after it": f"```python\n{P}```<|im_end|>",
    "code on the line of the fence": f"```python {P}```",
    "on one line": f"Try ```{P.splitlines()[1]}``` as it is.",
    "mentioned before": f"Put it in ```python ... ``` blocks.\n```python\n{P}```",
    "never closed": f"Sure!\n```python\n{P}",
    "never closed, then opened again": f"```python\nx = 1\n```python\n{P}```",
    "an unfinished one after it": f"```python\n{P}```\nA test:\n```python\nprint(f(",
    "a command after it": f"```python\n{P}```\nRun it:\n```bash\npython main.py\n```",
    "a command after a bare one": f"```\n{P}```\n```sh\n$ python main.py\n```",
    "its output after it": f"```python\n{P}```\nOutput:\n```\n6\n```",
    "named output after it": f"```python\n{P}```\n```output\nx = 6\n```",
    "text after it": f"```python\n{P}```\n```text\n3, 4\n```",
    "a session after it": f"```python\n{P}```\n```python\n>>> double(3)\n6\n```",
    "an answer tag": f"<think>It is easy.</think>\n<answer>\n{P}</answer>",
    "a code tag": f"Here:\n<code>\n{P}</code>\nIt doubles.",
    "a block of Markdown": f"````markdown\n# Doubling\n```python\n{P}```\n````",
    "a command after an unfenced program": f"{P}```bash\npython main.py\n```",
}


@pytest.mark.parametrize("name", FENCES)
def test_a_program_is_found_in_any_shape_of_fence(name):
    program = code.extract_program(FENCES[name])
    assert program.strip() in (P.strip(), P.splitlines()[1])


@pytest.mark.parametrize(
    "program",
    [
        'def f():\n    """\n    ```\n    f()\n    ```\n    """\n    return 1\n',
        'mark = """\n```python\n"""\nprint(mark)\n',
        "x = 'a\u2028```\x85```'\n",
        "print('```')  # don't stop at ```\nprint(1)\n",
        "print('~~~')\n",
    ],
)
def test_a_fence_in_a_string_or_comment_belongs_to_the_program(program):
    assert code.extract_program(program) == program
    assert code.extract_program(f"So:\n```python\n{program}```\nIt's done.\n") == program


def test_programs_of_a_small_model_are_found_as_a_reader_finds_them():
    """The code of completions.jsonl; by hand: the first and the last line of the program, and how many it has."""
    lines = (Path(__file__).parent / "completions.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["asked"] == "code"]
    for row in rows:
        program = code.extract_program(row["text"], row["function"]).strip().splitlines()
        assert [program[0], program[-1], len(program)] == row["program"], row["text"]
    assert rows


@pytest.mark.parametrize("end", ["```", "```\n", "```\nThis function adds two numbers.\nIt is short.\n"])
def test_an_invalid_program_before_a_lone_fence_is_the_program(end):
    """It earns nothing, and its reason is its syntax, not that of the prose after it."""
    for program in ("def f(a, b:\n    return a + b\n", "import sys\nprint(sys.argv[1)\n", "x = input(\nprint(x)\n"):
        assert code.extract_program(f"{program}{end}") == program
    assert code.extract_program("To add, use a function:\n```\nf(1)\n") == "f(1)\n"  # prose opens no program
    assert code.extract_program(f"def f(a:\n```\n{P}") == P  # a program after the fence


def test_a_string_that_never_ends_hides_no_fence():
    assert code.extract_program("```python\n'''\nx\n```\nb\n```python\ny = 1\n```") == "y = 1\n"


def test_a_function_that_is_called_decides_between_blocks():
    usage = "```python\ndef f(n):\n    return 2 * n\n```\nUse it:\n```python\nprint(f(2))\n```"
    begun = usage.removeprefix("```python\n")  # the prompt has opened the fence
    assert code.extract_program(usage, "f") == code.extract_program(begun, "f") == "def f(n):\n    return 2 * n\n"
    assert code.extract_program(usage) == "print(f(2))\n"
    assert code.extract_program(usage, "g") == "print(f(2))\n"


@pytest.mark.parametrize(
    "completion", ["", "```py\n    ```\nx", "text with ``` inside", "```\n\n```", "x" * 200_000, "```"]
)
def test_a_completion_without_a_program(completion):
    assert code.extract_program(completion) is None
