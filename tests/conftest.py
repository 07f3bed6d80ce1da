"""JAX settings for all tests. They must be set before the first use of a device."""

import contextlib
import ctypes
import gc
import itertools
import os
import resource
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import few_devices
import gcs
import jax
import pytest
from file_schedule import pytest_xdist_make_scheduler  # noqa: F401  a hook

jax.config.update("jax_platforms", "cpu")  # an installed libtpu without a TPU may wait for one
jax.config.update("jax_num_cpu_devices", 8)  # every sharding test runs on any machine
# an advantage [B] where [B, T] was due is an error, B == T or not
jax.config.update("jax_numpy_rank_promotion", "raise")
# Most of the suite's time is compilation: the programs run once or twice, so XLA's costly passes do not pay. Processes
# that a test starts choose for themselves.
jax.config.update("jax_disable_most_optimizations", True)
# An exception in traced code costs a quarter more if jax removes its own frames from the traceback.
jax.config.update("jax_traceback_filtering", "off")
jax.config.update("jax_traceback_in_locations_limit", 0)  # a program of 12 CPU-seconds compiles in 11 without its lines
if jax.__version_info__[:2] == (0, 10):  # XLA aborts on a flag that it does not have; other versions compile slower
    # The newer fusion emitters of XLA on CPU double the time of a compilation. XLA reads the variable once.
    given = os.environ.get("XLA_FLAGS")
    # One LLVM module instead of several, and no search for an order that runs operations at once, save a fifth more.
    flags = (
        "use_fusion_emitters=false",
        "parallel_codegen_split_count=1",
        "enable_concurrency_optimized_scheduler=false",
    )
    os.environ["XLA_FLAGS"] = " ".join((*(f"--xla_cpu_{flag}" for flag in flags), given or ""))
    jax.devices()
    if given is None:
        del os.environ["XLA_FLAGS"]  # not for the processes that a test starts
    else:
        os.environ["XLA_FLAGS"] = given
    # A context of MLIR takes 5 ms, a fifth of the time that a small program compiles in: the next 300 share one.
    from jax._src.interpreters import mlir

    fresh, shared = mlir.make_ir_context, itertools.count()
    contexts = {}

    def make_ir_context():
        number = next(shared) // 300
        if number not in contexts:
            contexts.clear()
            contexts[number] = fresh()
        return contexts[number]

    mlir.make_ir_context = make_ir_context
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parents[1] / ".cache" / "jax"))
# Storing small programs too makes the first run slower and the later ones faster, as in `make unit`.
least_s = float(os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", least_s)


# Processes that a test starts share a cache of their own. Test processes keep the allocator as it is.
os.environ.setdefault("GSPAX_COMPILATION_CACHE", str(Path(__file__).parents[1] / ".cache" / "compiled"))
os.environ.setdefault("MALLOC_ARENA_MAX", "8")

TESTS = Path(__file__).parent
sys.path.append(str(TESTS.parent / "experiments"))  # its tasks, as `gspax train` finds them beside an experiment file
PROCESSES = "connections joining processes pushes saves security transfer watchdog"
FORMATS = "config data experiment hf losses report run"
TIERS = {  # the folders and files of a tier; all others are of tier "device": they compile models and run them
    "unit": (*(f"{name}/" for name in FORMATS.split()), "tools/test_comparison", "tools/test_diagnosis"),
    "process": ("faults/", *(f"parallel/test_{name}" for name in PROCESSES.split())),
    "release": ("release/",),
    "real": ("real/",),
}

COSTLY = TESTS / "costly.txt"  # tests of over half a CPU-second, written by `make costs`; they wait for `make release`
COSTS = os.environ.get("TEST_COSTS", "")  # a file to write the CPU-seconds of each test to

# What makes the functions that a run compiles, by the module that calls it.
MAKERS = {
    "gspax.learner.updates": "make_objective make_update make_score make_gradient make_route",
    "gspax.rollout.runtime": "make_optimizer",
    "gspax.training.warm_start": "make_optimizer make_train_step",
}

# Bytes a worker may hold, most of them compiled programs. Linux lets a process map memory 65,530 times, which a worker
# reaches at 7 GB of programs: XLA then crashes in the middle of a file.
BUDGET_BETWEEN_FILES = 2 * 10**9
BUDGET_BETWEEN_TESTS = 3 * 10**9
JITTED = type(jax.jit(abs))


def pytest_collection_modifyitems(items):
    """Mark each test with its tier, and those of over half a CPU-second that are not `kept` with `release` besides."""
    listed = COSTLY.read_text(encoding="utf-8").splitlines()
    costly = set() if COSTS else {*listed}
    number = Counter(name.partition("::")[0].removeprefix("tests/") for name in listed)
    for item in items:
        name = place(item)
        item.add_marker(next((tier for tier, places in TIERS.items() if name.startswith(places)), "device"))
        if item.nodeid in costly and item.get_closest_marker("kept") is None:
            item.add_marker("release")
    # Long files first, so that the workers end together. A file's tests stay in their order.
    items.sort(key=lambda item: (not place(item).startswith("release/"), -number[place(item)]))


def place(item):
    return item.path.relative_to(TESTS).as_posix()


def pytest_collection_finish():
    """Leave what is there now out of garbage collection, and collect seldom: a trace makes much that it keeps."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # 8 % less than 700, 10, 10


if COSTS:

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item):
        """Write down what a test costs, with its fixtures and the processes that it has waited for."""
        before = cpu_seconds()
        result = yield
        with open(COSTS, "a", encoding="utf-8") as file:
            file.write(f"{cpu_seconds() - before:.2f} {item.nodeid}\n")
        return result


def cpu_seconds():
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.fixture(scope="module", autouse=True)
def _drop_programs_of_a_file():
    """The programs of gspax's functions, which a test may have changed; those of jax's serve the next file too."""
    yield
    modules = [module for name, module in sys.modules.items() if name.startswith("gspax.")]
    for value in [value for module in modules for value in vars(module).values()]:
        if isinstance(value, JITTED):
            value.clear_cache()
    drop_compiled_programs(BUDGET_BETWEEN_FILES)
    end_calls()


def end_calls():
    """Close the calls of user functions that a file has left open, as failed tests do: each has two threads or more."""
    watchers = [thread for thread in threading.enumerate() if thread.name == "gspax-calls"]
    for watch in [getattr(thread, "_target", None) for thread in watchers]:  # a thread that ends has none
        if watch is not None:
            watch.__self__.close()


@pytest.fixture(autouse=True)
def _drop_programs_of_a_test():
    yield
    drop_compiled_programs(BUDGET_BETWEEN_TESTS)


def drop_compiled_programs(budget):
    """Clear JAX's caches if this process holds more than `budget` bytes: all programs together take several GB."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return
    if pages * os.sysconf("SC_PAGE_SIZE") > budget:
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(AttributeError):  # glibc: return the freed pages, more than half
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module", autouse=True)
def made():
    """What `MAKERS` made in a file, by their arguments: its runs of equal settings share what they compile."""
    kept = {}

    def keep(make):
        def kept_or_made(*args, **kwargs):
            key = make, args, *kwargs.items()
            try:
                return kept[key] if key in kept else kept.setdefault(key, make(*args, **kwargs))
            except TypeError:  # an argument that cannot be a key
                return make(*args, **kwargs)

        return kept_or_made

    with pytest.MonkeyPatch.context() as patch:
        for module, names in MAKERS.items():
            for name in names.split() if module in sys.modules else ():
                patch.setattr(sys.modules[module], name, keep(getattr(sys.modules[module], name)))
        yield kept


@pytest.fixture(scope="module")
def one_device():
    """Runs of the test's own process see one device: eight compile and run several times longer."""
    with few_devices.few_devices(1):
        yield


@pytest.fixture(scope="session")
def gcs_server():
    """A server of buckets for this process and those that it starts; tensorstore reads its address once."""
    with gcs.serve() as server:
        os.environ.update(server.env)
        yield server


@pytest.fixture
def bucket(gcs_server):
    """The path of a run in a bucket of its own, and the server."""
    from gspax.storage.paths import to_path

    name = f"bucket-{len(gcs_server.buckets)}"
    gcs_server.buckets[name], gcs_server.faults = {}, lambda request: None
    gcs_server.requests.clear()
    yield to_path(f"gs://{name}/runs/a"), gcs_server
    gcs_server.faults = lambda request: None


@pytest.fixture(autouse=True)
def _write_no_report(monkeypatch):
    """Runs of the test's own process write no report, which takes three quarters of the time of a run of a few steps.

    The fixtures of a module come before this one: their runs write theirs.
    """
    if "gspax.training.loop" in sys.modules:
        monkeypatch.setattr("gspax.training.open_training.run_page", SimpleNamespace(write=lambda workdir: None))


@pytest.fixture
def unevaluated(monkeypatch):
    """Runs of the test's own process evaluate nothing, which takes an eighth of the time of a run of a few steps."""
    monkeypatch.setattr("gspax.training.run_log.RunLog.write_evaluation", lambda *_: None)
