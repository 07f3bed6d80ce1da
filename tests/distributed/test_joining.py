"""Who takes part in a run, without starting one: what is found, the roll call over loopback, and who holds what."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax._src.clusters import cloud_tpu_cluster
from jax.sharding import NamedSharding, PartitionSpec

from gspax.distributed import joining, multihost
from gspax.distributed.joining import ProcessInfo, find_process, rendezvous
from gspax.errors import AbsentError, UserError

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
    """The environment of a machine of its own, wherever the tests run."""
    for name in [*EXPLICIT, *SLURM, *GKE, "JAX_COORDINATOR_PORT", "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"]:
        monkeypatch.delenv(name, raising=False)


def with_variables(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.filterwarnings("error")
def test_a_single_machine_is_alone_and_asks_nobody(monkeypatch):
    def ask(*arguments, **keywords):
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket, "create_connection", ask)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", ask)
    assert find_process() is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # any pod has it
    assert find_process() is None
    assert find_process("host:1234", 1, 0) is None
    joining.join(None, {})
    joining.leave(1)


def test_options_win_over_variables_and_variables_over_the_platform(monkeypatch):
    with_variables(monkeypatch, SLURM)
    assert find_process() == ProcessInfo("node03:61447", 4, 1)
    with_variables(monkeypatch, EXPLICIT)
    assert find_process() == ProcessInfo("host:1234", 4, 2)
    assert find_process("other:1", 8, 7) == ProcessInfo("other:1", 8, 7)
    assert find_process(index=0) == ProcessInfo("host:1234", 4, 0)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    assert find_process() is None


def test_the_hosts_of_all_slices_of_a_tpu_job(monkeypatch):
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    with_variables(monkeypatch, GKE)
    assert find_process() == ProcessInfo("localhost:8482", 6, 5)
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert find_process() is None, "one host"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("host:1", 2, None), r"wanted all of --coordinator .* got host:1, 2, None"),
        ((None, 2, 0), "wanted all of"),
        (("host:1", 2, 2), "wanted a process of 0 to 1, got 2"),
        (("host", 2, 0), "wanted the coordinator as HOST:PORT, got 'host'"),
        ((":80", 2, 0), "wanted the coordinator as HOST:PORT"),
    ],
)
def test_half_an_answer_is_an_error(given, said):
    with pytest.raises(UserError, match=said):
        find_process(*given)


def test_a_variable_that_is_no_number_is_named(monkeypatch):
    with_variables(monkeypatch, EXPLICIT | {"JAX_PROCESS_ID": "two"})
    with pytest.raises(UserError, match="JAX_PROCESS_ID: wanted a whole number, got 'two'"):
        find_process()


def test_a_platform_that_does_not_answer_is_an_error(monkeypatch):
    def unreachable(key):
        raise ConnectionError("no route")

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", unreachable)
    with pytest.raises(UserError, match=r"does not say who takes part \(ConnectionError: no route\)"):
        find_process()


# The roll call: each process is a thread here


@pytest.fixture
def address():
    with socket.create_server(("localhost", 0)) as free:
        return f"localhost:{free.getsockname()[1]}"


def roll(address, cards, *, count=None, timeout=20.0, counts=None):
    """What each of the processes {index: card} hears: None if all is well, else the error's sentence."""
    count = count or len(cards)

    def call(index):
        try:
            rendezvous(ProcessInfo(address, (counts or {}).get(index, count), index), cards[index], timeout)
        except UserError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(cards)) as pool:
        return dict(zip(cards, pool.map(call, cards), strict=True))


CARD = {"verb": "train", "file": "ab12", "experiment": {"type": "Experiment", "loss": {"clip_low": 3e-4}, "seed": 0}}


def test_all_are_there_with_the_same(address):
    assert set(roll(address, dict.fromkeys((2, 0, 1), CARD)).values()) == {None}


def test_who_is_missing_is_named_everywhere(address):
    heard = roll(address, {0: CARD, 3: CARD}, count=5, timeout=0.7)
    assert set(heard.values()) == {"processes: processes 1, 2, 4 of 5 did not join within 1 seconds"}
    heard = roll(address, {0: CARD, 1: CARD}, count=3, timeout=0.7)
    assert set(heard.values()) == {"processes: process 2 of 3 did not join within 1 seconds"}


def test_absence_is_told_apart_because_trying_again_may_help(address):
    with pytest.raises(AbsentError):
        rendezvous(ProcessInfo(address, 2, 0), CARD, 0.1)
    with pytest.raises(AbsentError):
        rendezvous(ProcessInfo(address, 2, 1), CARD, 0.1)


def test_a_missing_coordinator_is_named(address):
    heard = roll(address, {1: CARD, 2: CARD}, count=3, timeout=0.5)
    assert set(heard.values()) == {f"processes: process 0 of 3 did not answer at {address} within 0 seconds"}


def test_another_experiment_or_file_is_named_everywhere(address):
    other = CARD | {"experiment": CARD["experiment"] | {"loss": {"clip_low": 1e-3}}}
    heard = roll(address, {0: CARD, 1: CARD, 2: other, 3: CARD | {"file": "cd34"}})
    assert len(set(heard.values())) == 1
    assert "process 2 differs from process 0 in experiment.loss.clip_low: 3e-4 -> 0.001" in heard[1]
    assert "process 3 differs from process 0 in file: ab12 -> cd34" in heard[1] and "process 1" not in heard[1]


def test_processes_that_were_told_different_numbers(address):
    heard = roll(address, {0: CARD, 1: CARD}, counts={0: 2, 1: 4})
    assert set(heard.values()) == {"processes: process 1 was told of 4 processes, process 0 of 2"}


def test_two_of_one_number(address):
    place, heard = ProcessInfo(address, 3, 1), []

    def call(place):
        with pytest.raises(UserError) as caught:
            rendezvous(place, CARD, 20.0)
        heard.append(str(caught.value))

    threads = [threading.Thread(target=call, args=(each,)) for each in (place, place, ProcessInfo(address, 3, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == ["processes: two processes were told that they are process 1 of 3"] * 3


def test_strangers_at_the_port_do_not_count(address):
    host, port = address.split(":")

    def knock():
        while True:
            try:
                with socket.create_connection((host, int(port))) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                return
            except ConnectionRefusedError:
                pass

    stranger = threading.Thread(target=knock)
    stranger.start()
    late = threading.Timer(0.5, lambda: heard.update(roll(address, {1: CARD}, count=2)))
    heard = {}
    late.start()
    heard.update(roll(address, {0: CARD}, count=2))
    late.join()
    stranger.join()
    assert heard == {0: None, 1: None}


def test_the_port_is_free_again_before_anyone_hears_the_verdict(address, monkeypatch):
    """Jax's own service listens there next, and the others turn to it at once."""
    servers, closed = [], []
    listen, send = joining._server, joining._send

    def tell(connection, value):
        if "wrong" in value:
            closed.append(servers[0].fileno() == -1)
        send(connection, value)

    monkeypatch.setattr(joining, "_server", lambda port: servers.append(listen(port)) or servers[0])
    monkeypatch.setattr(joining, "_send", tell)
    roll(address, dict.fromkeys((0, 1, 2), CARD))
    assert closed == [True, True]


def test_a_port_in_use_is_an_error(address):
    port = int(address.rpartition(":")[2])
    with socket.create_server(("", port)), pytest.raises(UserError, match=f"cannot listen on port {port}"):
        rendezvous(ProcessInfo(address, 2, 0), CARD, 1.0)


# What is exchanged, and who holds what


def told(monkeypatch, *others):
    """Other processes beside this one, number 0, that say these things in turn."""
    answers = iter(others)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost, "gather", lambda value: [value, next(answers)])


def test_what_fails_on_another_process_fails_here(monkeypatch):
    assert multihost.all_or_raise(lambda: 3) == 3
    told(monkeypatch, None, "wanted 2, got 3")
    assert multihost.all_or_raise(lambda: 5) == 5
    with pytest.raises(UserError, match="process 1: wanted 2, got 3"):
        multihost.all_or_raise(lambda: 5)


def test_what_fails_here_is_told_to_the_others_first(monkeypatch):
    said = []
    monkeypatch.setattr(multihost, "gather", lambda value: said.append(value) or [value, None])

    def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        multihost.all_or_raise(fail)
    assert said == ["KeyError: 'x'"]


def test_the_entries_of_all_processes_make_a_whole_list(monkeypatch):
    told(monkeypatch, {1: "b", 2: "theirs"})
    assert multihost.gather_rows(["a", None, "mine"]) == ["a", "b", "mine"]


def test_rows_of_a_replicated_or_split_array_come_once_each_and_in_their_place():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("rows", "columns"))
    array = np.arange(64, dtype=np.int32).reshape(16, 4)
    for axes in ((), ("rows",), (("rows", "columns"),)):
        rows = multihost.owned_rows(multihost.to_devices(array, NamedSharding(mesh, PartitionSpec(*axes))))
        assert sorted(rows) == list(range(16))
        for row, values in rows.items():
            np.testing.assert_array_equal(values, array[row])


class Half:
    """A sharding of which this process has the devices of rows 2 to 3 and, as a copy, of row 5."""

    def addressable_devices_indices_map(self, shape):
        return {"device 1": (slice(2, 4),), "device 2": (slice(5, 6),), "device 3": (slice(2, 4),)}


def test_only_what_the_devices_hold_is_made():
    made = []
    rows = multihost.local_rows(lambda index: made.append(index) or -index, range(10, 18), Half())
    assert rows == [None, None, -12, -13, None, -15, None, None] and sorted(made) == [12, 13, 15]
    every = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    assert multihost.local_rows(lambda index: index, range(8), every) == list(range(8))
