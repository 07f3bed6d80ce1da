"""Finding the processes of a run, the rendezvous over loopback, and the rows that a process holds."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from api import multihost
from jax._src.clusters import cloud_tpu_cluster
from jax.sharding import NamedSharding, PartitionSpec

from gspax.errors import FailureError, UserError
from gspax.experiment import difference
from gspax.parallel import joining
from gspax.parallel.connections import Channel
from gspax.parallel.joining import ProcessInfo, find_process, rendezvous

EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[03-06]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
GKE = {
    "TPU_WORKER_HOSTNAMES": "localhost,other",
    "TPU_WORKER_ID": "1",
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """The environment of a single machine, wherever the tests run."""
    for name in [*EXPLICIT, *SLURM, *GKE, "JAX_COORDINATOR_PORT", "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"]:
        monkeypatch.delenv(name, raising=False)


def set_variables(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.filterwarnings("error")
def test_a_single_machine_runs_alone_and_uses_no_network(monkeypatch):
    def connect(*arguments, **keywords):
        raise AssertionError("used the network")

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", connect)
    assert find_process() is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # any pod has it
    assert find_process() is None
    assert find_process("host:1234", 1, 0) is None
    joining.join(None, {}, difference)
    joining.leave(1)


def test_options_override_variables_which_override_the_platform(monkeypatch):
    set_variables(monkeypatch, SLURM)
    assert find_process() == ProcessInfo("node03:61447", 4, 1)
    set_variables(monkeypatch, EXPLICIT)
    assert find_process() == ProcessInfo("host:1234", 4, 2)
    assert find_process("other:1", 8, 7) == ProcessInfo("other:1", 8, 7)
    assert find_process(index=0) == ProcessInfo("host:1234", 4, 0)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    assert find_process() is None


def test_the_hosts_of_all_slices_of_a_tpu_job(monkeypatch):
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    set_variables(monkeypatch, GKE)
    assert find_process() == ProcessInfo("localhost:8482", 6, 5)
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert find_process() is None, "one host"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host:1", 2, None), r"wanted all of --coordinator .* got host:1, 2, None"),
        ((None, 2, 0), "wanted all of"),
        (("host:1", 2, 2), "wanted a process from 0 to 1, got 2"),
        (("host", 2, 0), "wanted the coordinator as HOST:PORT, got 'host'"),
        ((":80", 2, 0), "wanted the coordinator as HOST:PORT"),
    ],
)
def test_incomplete_or_invalid_arguments_are_errors(arguments, message):
    with pytest.raises(UserError, match=message):
        find_process(*arguments)


def test_a_variable_that_is_not_an_integer_is_named(monkeypatch):
    set_variables(monkeypatch, EXPLICIT | {"JAX_PROCESS_ID": "two"})
    with pytest.raises(UserError, match="JAX_PROCESS_ID: wanted an integer, got 'two'"):
        find_process()


def test_a_platform_that_does_not_answer_is_an_error(monkeypatch):
    def unreachable(key):
        raise ConnectionError("no route")

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", unreachable)
    with pytest.raises(UserError, match=r"cannot find the processes of this platform \(ConnectionError: no route\)"):
        find_process()


# The rendezvous: each process is a thread here


@pytest.fixture
def address():
    with socket.create_server(("localhost", 0)) as free:
        return f"localhost:{free.getsockname()[1]}"


def hold_rendezvous(address, fingerprints, *, count=None, timeout=20.0, counts=None):
    """The message of the error that each process {index: fingerprint} raises, or None."""
    count = count or len(fingerprints)

    def call(index):
        try:
            info = ProcessInfo(address, (counts or {}).get(index, count), index)
            rendezvous(info, fingerprints[index], difference, timeout, SECRET)
        except UserError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(fingerprints)) as pool:
        return dict(zip(fingerprints, pool.map(call, fingerprints), strict=True))


SECRET = b"s" * 32
SAME = {"file": "ab12", "experiment": {"type": "Experiment", "loss": {"clip_low": 3e-4}, "seed": 0}}


def test_processes_with_the_same_fingerprint_meet(address):
    assert set(hold_rendezvous(address, dict.fromkeys((2, 0, 1), SAME)).values()) == {None}


def test_missing_processes_are_named_on_every_other_process(address):
    raised = hold_rendezvous(address, {0: SAME, 3: SAME}, count=5, timeout=0.7)
    assert set(raised.values()) == {"processes: processes 1, 2, 4 of 5 did not join within 1 seconds"}
    raised = hold_rendezvous(address, {0: SAME, 1: SAME}, count=3, timeout=0.7)
    assert set(raised.values()) == {"processes: process 2 of 3 did not join within 1 seconds"}


@pytest.mark.parametrize("index", [0, 1])
def test_a_timeout_has_its_own_exception_because_it_can_be_retried(address, index):
    with pytest.raises(FailureError):
        rendezvous(ProcessInfo(address, 2, index), SAME, difference, 0.1, SECRET)


def test_a_missing_coordinator_is_named(address):
    raised = hold_rendezvous(address, {1: SAME, 2: SAME}, count=3, timeout=0.5)
    assert set(raised.values()) == {f"processes: process 0 of 3 did not answer at {address} within 0 seconds"}


def test_a_different_experiment_or_file_is_named_on_every_process(address):
    other = SAME | {"experiment": SAME["experiment"] | {"loss": {"clip_low": 1e-3}}}
    raised = hold_rendezvous(address, {0: SAME, 1: SAME, 2: other, 3: SAME | {"file": "cd34"}})
    assert len(set(raised.values())) == 1
    assert "process 2 differs from process 0 in experiment.loss.clip_low: 3e-4 -> 0.001" in raised[1]
    assert "process 3 differs from process 0 in file: ab12 -> cd34" in raised[1] and "process 1" not in raised[1]


def test_different_process_counts_are_an_error(address):
    raised = hold_rendezvous(address, {0: SAME, 1: SAME}, counts={0: 2, 1: 4})
    assert set(raised.values()) == {"processes: process 1 was started as one of 4 processes, process 0 as one of 2"}


def test_two_processes_with_one_index_are_an_error(address):
    def call(index):
        with pytest.raises(UserError) as caught:
            rendezvous(ProcessInfo(address, 3, index), SAME, difference, 20.0, SECRET)
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        raised = set(pool.map(call, (1, 1, 0)))
    assert raised == {"processes: two processes were started as process 1 of 3"}


def test_other_connections_to_the_port_are_ignored(address):
    host, port = address.split(":")

    def send_http():
        while True:
            try:
                with socket.create_connection((host, int(port))) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                return
            except ConnectionRefusedError:
                pass

    raised = {}
    stranger = threading.Thread(target=send_http)
    late = threading.Timer(0.5, lambda: raised.update(hold_rendezvous(address, {1: SAME}, count=2)))
    stranger.start()
    late.start()
    raised.update(hold_rendezvous(address, {0: SAME}, count=2))
    late.join()
    stranger.join()
    assert raised == {0: None, 1: None}


def test_the_port_is_free_before_any_process_gets_the_outcome(address, monkeypatch):
    """jax's coordination service listens on it next, and the other processes connect to it immediately."""
    servers, closed = [], []
    listen, send = joining._listen, Channel.send

    def check_and_send(channel, kind, content):
        if kind == joining.OUTCOME:
            closed.append(servers[0].fileno() == -1)
        send(channel, kind, content)

    monkeypatch.setattr(joining, "_listen", lambda *arguments: servers.append(listen(*arguments)) or servers[0])
    monkeypatch.setattr(Channel, "send", check_and_send)
    hold_rendezvous(address, dict.fromkeys((0, 1, 2), SAME))
    assert closed == [True, True]


def test_a_port_in_use_is_an_error(address):
    port = int(address.rpartition(":")[2])
    with socket.create_server(("", port)), pytest.raises(UserError, match=f"cannot listen on port {port}"):
        rendezvous(ProcessInfo(address, 2, 0), SAME, difference, 1.0, SECRET)


# Exchange between processes, and the rows that each one holds


def stub_other_process(monkeypatch, *values):
    """Make this process 0 of 2; the other passes these values to successive calls of `gather`."""
    answers = iter(values)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost, "gather", lambda value: [value, next(answers)])


def test_a_failure_on_another_process_is_raised_here(monkeypatch):
    assert multihost.all_or_raise(lambda: 3) == 3
    stub_other_process(monkeypatch, None, ("wanted 2, got 3", 2), ("disk full", 1))
    assert multihost.all_or_raise(lambda: 5) == 5
    for code, sentence in ((2, "wanted 2, got 3"), (1, "disk full")):
        with pytest.raises(UserError, match=f"process 1: {sentence}") as caught:
            multihost.all_or_raise(lambda: 5)
        assert caught.value.exit_code == code


def test_a_failure_here_is_sent_to_the_others_first(monkeypatch):
    sent = []
    monkeypatch.setattr(multihost, "gather", lambda value: sent.append(value) or [value, None])

    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        multihost.all_or_raise(fail)
    assert sent == [("KeyError: 'x'", 1)]


def test_gather_rows_fills_in_the_rows_of_other_processes(monkeypatch):
    stub_other_process(monkeypatch, {1: "b", 2: "theirs"})
    assert multihost.gather_rows({0: "a", 2: "mine"}, 3) == ["a", "b", "mine"]


def test_each_row_of_a_replicated_or_sharded_array_has_one_owner():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "columns"))
    array = np.arange(64, dtype=np.int32).reshape(16, 4)
    for axes in ((), ("rows",), (("rows", "columns"),)):
        rows = multihost.owned_rows(multihost.to_devices(array, NamedSharding(mesh, PartitionSpec(*axes))))
        assert sorted(rows) == list(range(16))
        for row, values in rows.items():
            np.testing.assert_array_equal(values, array[row])


class PartlyLocal:
    """A sharding whose rows 2 and 3, replicated, and row 5 are on devices of this process."""

    def addressable_devices_indices_map(self, shape):
        return {"device 1": (slice(2, 4),), "device 2": (slice(5, 6),), "device 3": (slice(2, 4),)}


def test_only_local_rows_are_made():
    made = []
    rows = multihost.local_rows(lambda index: made.append(index) or -index, range(10, 18), PartlyLocal())
    assert rows == [None, None, -12, -13, None, -15, None, None] and sorted(made) == [12, 13, 15]
    groups = multihost.local_rows(lambda index: index, range(10, 14), PartlyLocal(), group=2)
    assert groups == [None, 11, 12, None]
    every = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    assert multihost.local_rows(lambda index: index, range(8), every) == list(range(8))
