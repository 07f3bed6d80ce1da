"""The profile of a step (experiments/benchmarks/profile_parts.py)."""

import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "experiments" / "benchmarks"))
import profile_parts

PROGRAM = """HloModule jit_update, is_scheduled=true

FileNames
1 "/x/gspax/learner/updates.py"
2 "/x/gspax/model/kernels/attention.py"
3 "/x/jax/lax.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=1}
2 {file_name_id=2 function_name_id=1 line=2}
3 {file_name_id=3 function_name_id=1 line=3}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=2}
4 {file_location_id=3 parent_frame_id=4}

ENTRY %main {
  %dot.1 = f32[2]{0} dot(%a, %b), metadata={op_name="dot" stack_frame_id=3}
  ROOT %while.2 = f32[2]{0} while(%dot.1), metadata={op_name="while" stack_frame_id=1}
  %other = f32[2]{0} copy(%dot.1), metadata={op_name="copy" stack_frame_id=4}
}
"""


def test_an_operation_counts_to_the_innermost_file_of_gspax():
    assert profile_parts.read_sources(PROGRAM) == {"dot.1": "attention.py", "while.2": "updates.py"}


def test_the_parts_of_a_program_and_of_the_first_step(monkeypatch):
    """A loop of 10 ms with two products of 3 ms inside it, and one of 2 ms on another thread."""

    def run(command, env, **_):
        folder = Path(command[command.index("--profile") + 1]).parent
        (folder / "programs").mkdir()
        (folder / "programs" / "module.jit_update.cpu_after_optimizations.txt").write_text(PROGRAM)
        assert f"--xla_dump_to={folder}/programs" in env["XLA_FLAGS"]
        operations = [(1, 0, 10, "while.2"), (1, 1, 3, "dot.1"), (1, 5, 3, "dot.1"), (2, 2, 2, "dot.1")]
        where = {"hlo_module": "jit_update"}
        events = [
            {"ph": "X", "tid": tid, "ts": 1e3 * begin, "dur": 1e3 * ms, "args": where | {"hlo_op": name}}
            for tid, begin, ms, name in operations
        ]
        trace = folder / "trace" / "plugins" / "profile" / "now" / "perfetto_trace.json.gz"
        trace.parent.mkdir(parents=True)
        trace.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, {"ph": "M"}]}).encode()))
        (folder / "bench.json").write_text(json.dumps({"first_step_s": 9.0}))
        log = "Finished XLA compilation of jit(update) in 4.5 sec\nFinished XLA compilation of jit(<lambda>) in 0.5 sec"
        return profile_parts.subprocess.CompletedProcess(command, 0, "", log)

    monkeypatch.setattr(profile_parts.subprocess, "run", run)
    profile = profile_parts.measure(Path("FILE"), [])
    assert profile.parts["update"] == pytest.approx({"attention": 8, "everything else": 4})
    assert profile.compile_s == {"update": 4.5, "<lambda>": 0.5}
    assert "| attention | 0 | 8 |" in profile_parts.tables(profile)
    assert "| imports, tracing, and everything else | 4.0 |" in profile_parts.tables(profile)
