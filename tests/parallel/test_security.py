"""Hostile peers at the coordinator's port: each is dropped and named, none ends, delays or fills the rendezvous."""

import hashlib
import hmac
import json
import pickle
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from gspax.errors import UserError
from gspax.experiment import difference
from gspax.parallel import connections, joining, secret, wire
from gspax.parallel.joining import ProcessInfo
from gspax.parallel.wire import MessageError

SECRET = b"s" * 32
FINGERPRINT = {"experiment": {"seed": 0}}


class Payload:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def address():
    with socket.create_server(("localhost", 0)) as free:
        return f"localhost:{free.getsockname()[1]}"


def connect(address):
    """A connection to process 0, as soon as it listens."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=10)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def send_until_dropped(connection, data, times=1):
    """Send, and wait until the other end closes the connection; what it sent."""
    received = b""
    try:
        for _ in range(times):
            connection.sendall(data)
        while part := connection.recv(4096):
            received += part
    except OSError:
        pass
    return received


def meet_after(address, attack):
    """Run an attack on process 0 of 2, then let process 1 join: both must succeed. Returns their channels."""

    def join(index, secret=SECRET):
        return joining.rendezvous(ProcessInfo(address, 2, index), FINGERPRINT, difference, 30.0, secret)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(join, 0)
        attack()
        second = pool.submit(join, 1)
        return first.result(), second.result()


def close(*all_channels):
    for channels in all_channels:
        for each in channels.values():
            each.close()


def old_message(fingerprint):
    return json.dumps({"index": 1, "count": 2, "fingerprint": fingerprint}).encode() + b"\n"


STRANGERS = {
    "http": lambda path: b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100,
    "pickle": lambda path: pickle.dumps(Payload(path)) + b"\n" * 100,
    "a message without the handshake": lambda path: old_message({}) + b" " * 100,
    "malformed JSON": lambda path: b'{"index": 1, "count": ' + b"\n" * 100,
    "no fingerprint": lambda path: b'{"index": 1, "count": 2}\n' + b"\n" * 100,
    "deep nesting": lambda path: b"[" * 100_000 + b"\n",
    "noise": lambda path: bytes(range(256)) * 8,
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_dropped_and_named(name, address, tmp_path, capsys):
    def attack():
        with connect(address) as connection:
            received = send_until_dropped(connection, STRANGERS[name](tmp_path / "executed"))
        assert len(received) <= 40, "at most a nonce"

    close(*meet_after(address, attack))
    reason = "it is no process of this version of gspax"
    assert capsys.readouterr().err == f"gspax: warning: processes: dropped a connection from 127.0.0.1: {reason}\n"
    assert not (tmp_path / "executed").exists()


def test_a_line_of_600_mb_takes_no_memory(address):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def attack():
        with connect(address) as connection:
            send_until_dropped(connection, b"x" * 2**20, times=600)

    close(*meet_after(address, attack))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "kilobytes"


def drip(address, connected, dropped, limit=20.0):
    """Send a byte at a time; release `connected`, and append the seconds until the connection was closed."""
    with connect(address) as connection:
        connected.release()
        began = time.monotonic()
        try:
            while time.monotonic() - began < limit:
                connection.sendall(connections.MAGIC[:1])
                connection.settimeout(0.5)
                try:
                    if connection.recv(1) == b"":
                        break
                except TimeoutError:
                    pass
        except OSError:
            pass
        dropped.append(time.monotonic() - began)


@pytest.mark.parametrize(("timeout", "slots"), [(3.0, 64), (0.5, 4)], ids=["in parallel", "with few slots"])
def test_a_byte_at_a_time_neither_delays_the_others_nor_holds_the_connection(timeout, slots, address, monkeypatch):
    """One after the other they would take six timeouts. A slot is free again after the deadline of the exchange."""
    monkeypatch.setattr(connections, "HANDSHAKE_TIMEOUT", timeout)
    monkeypatch.setattr(joining, "AT_ONCE", slots)
    connected, dropped = threading.Semaphore(0), []
    strangers = [threading.Thread(target=drip, args=(address, connected, dropped)) for _ in range(6)]

    def attack():
        for each in strangers:
            each.start()
        for _ in strangers:
            connected.acquire()

    began = time.monotonic()
    close(*meet_after(address, attack))
    assert time.monotonic() - began < 9
    for each in strangers:
        each.join()
    assert len(dropped) == 6 and sorted(dropped)[3] < timeout + 4 and max(dropped) < 15


def test_a_process_with_another_secret_is_dropped_and_told(address, capsys):
    def attack():
        with connect(address) as connection, pytest.raises(connections.SecretError):
            connections.connect(connection, b"t" * 32)

    close(*meet_after(address, attack))
    assert "dropped a connection from 127.0.0.1: it has another secret" in capsys.readouterr().err.replace(
        "::ffff:", ""
    )
    with pytest.raises(UserError, match="process 0 of 2 did not answer"):
        joining.rendezvous(ProcessInfo(address, 2, 1), FINGERPRINT, difference, 0.3, b"t" * 32)


def test_the_secret_does_not_travel_and_a_recorded_exchange_is_of_no_use(address):
    """A relay records what process 1 sends; sending the same bytes again is refused."""
    recorded = {"up": b"", "down": b""}

    def forward(source, target, name):
        while part := source.recv(65536):
            recorded[name] += part
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)

    def attack():
        """Process 1 connects through the relay, and is lost before the rendezvous ends."""
        with socket.create_server(("127.0.0.1", 0)) as relay:
            near = socket.create_connection(relay.getsockname())
            far = relay.accept()[0]
        with near, far, connect(address) as up:
            threads = [threading.Thread(target=forward, args=each) for each in ((far, up, "up"), (up, far, "down"))]
            for each in threads:
                each.start()
            found = connections.connect(near, SECRET)
            found.send(joining.MESSAGE, b"not a message")
            near.shutdown(socket.SHUT_WR)
            for each in threads:
                each.join()
        assert SECRET not in recorded["up"] + recorded["down"] and len(recorded["up"]) > 100
        with connect(address) as connection:
            answer = send_until_dropped(connection, recorded["up"])
        assert answer[40:41] == connections.REFUSED and answer[41:] == bytes(32)

    close(*meet_after(address, attack))


def test_a_malformed_message_of_a_process_with_the_secret_is_dropped(address, capsys):
    good = {"index": 1, "count": 2, "token": "t", "fingerprint": {}}
    messages = [
        b"",
        b"\xff" * 100,
        pickle.dumps(3),
        wire.encode([good]),
        wire.encode({name: value for name, value in good.items() if name != "fingerprint"}),
        wire.encode({**good, "index": "1"}),
        wire.encode({**good, "index": True}),
        wire.encode({**good, "more": 1}),
        nested(50_000),
    ]

    def attack():
        for each in messages:
            with connect(address) as connection:
                found = connections.connect(connection, SECRET)
                found.send(joining.MESSAGE, each)
                with pytest.raises(OSError):
                    found.receive(1000, time.monotonic() + 10)

    close(*meet_after(address, attack))
    assert "Traceback" not in capsys.readouterr().err


def test_a_message_that_announces_too_much_is_refused_before_it_is_read():
    ours, theirs = pair()
    theirs.connection.sendall(b"\x01" + (2**40).to_bytes(8, "big") + bytes(32))
    with pytest.raises(MessageError, match="wanted at most 1000"):
        ours.receive(1000)


def pair():
    """The two ends of an authenticated connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        far = socket.create_connection(server.getsockname())
        accepted = pool.submit(connections.accept, server.accept()[0], SECRET)
        return connections.connect(far, SECRET), accepted.result()


def test_messages_arrive_in_order_and_both_ways():
    ours, theirs = pair()
    ours.send(3, b"first")
    ours.send(4, b"")
    theirs.send(5, b"x" * 3_000_000)
    assert (theirs.receive(10), theirs.receive(10)) == ((3, b"first"), (4, b""))
    assert ours.receive(3_000_000) == (5, b"x" * 3_000_000)


@pytest.mark.parametrize("change", ["content", "kind", "replay", "reflect"])
def test_a_message_that_was_changed_on_the_way_is_refused(change):
    ours, theirs = pair()
    ours.send(3, b"one value")
    wire_bytes = theirs.connection.recv(1000)
    if change == "content":
        wire_bytes = wire_bytes[:-1] + b"X"
    elif change == "kind":
        wire_bytes = b"\x04" + wire_bytes[1:]
    elif change == "replay":
        wire_bytes += wire_bytes
    target, receiver = (ours, theirs) if change != "reflect" else (theirs, ours)
    target.connection.sendall(wire_bytes)
    with pytest.raises(MessageError, match="wrong HMAC"):
        for _ in range(2):
            receiver.receive(1000)


def test_proofs_are_compared_in_constant_time(monkeypatch):
    compared = []
    original = hmac.compare_digest
    monkeypatch.setattr(connections.hmac, "compare_digest", lambda a, b: compared.append(a) or original(a, b))
    ours, theirs = pair()
    ours.send(1, b"x")
    theirs.receive(10)
    assert len(compared) == 3 and {len(each) for each in compared} == {hashlib.sha256().digest_size}


def test_a_host_that_disappears_is_noticed_by_the_kernel():
    """After 5 + 3 * 2 seconds, whatever Python's threads are doing."""
    for each in pair():
        option = lambda name, each=each: each.connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))  # noqa: E731
        assert each.connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        if hasattr(socket, "TCP_KEEPIDLE"):
            assert option("TCP_KEEPIDLE") + option("TCP_KEEPINTVL") * option("TCP_KEEPCNT") < 15


# Values


VALUES = [
    None,
    True,
    7,
    -(2**70),
    0.1,
    float("inf"),
    "text \u202e \ud800 \0",
    [],
    (1, [2, (3,)]),
    {0: {"a": None}, (1, 2): [1.5]},
    {"dict": 1, "array": 2},
]
ARRAYS = [
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.zeros((0, 4), bool),
    np.array([np.nan, -0.0, 1e-45], np.float32),
    np.arange(8, dtype=np.int64)[::2],
    np.float32(1.25),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_arrive_as_they_are(value):
    assert wire.decode(wire.encode(value)) == value
    assert repr(wire.decode(wire.encode(value))) == repr(value), "of the same types"


def test_arrays_arrive_with_their_bits():
    import ml_dtypes

    sent = [*ARRAYS, np.array([1.5, -2], ml_dtypes.bfloat16)]
    for array, got in zip(sent, wire.decode(wire.encode(sent)), strict=True):
        assert (got.dtype, got.shape) == (array.dtype, array.shape) and got.tobytes() == array.tobytes()
    assert wire.decode(wire.encode(ARRAYS[0])).flags.writeable


OTHERS = [
    object(),
    {1},
    b"bytes",
    np.array([object()]),
    np.array(["a"]),
    print,
    Payload("x"),
    1j,
    ProcessInfo("", 1, 0),
]


@pytest.mark.parametrize("value", OTHERS)
def test_anything_else_is_refused_when_it_is_sent(value):
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        wire.encode({"a": [value]})


def header(value, arrays=(), data=b""):
    text = json.dumps({"value": value, "arrays": arrays}).encode()
    return len(text).to_bytes(4, "big") + text + data


def nested(depth):
    text = b'{"arrays":[],"value":' + b"[" * depth + b"]" * depth + b"}"
    return len(text).to_bytes(4, "big") + text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xff\xff\xff{}",
        b"\0\0\0\x02[]",
        b"\0\0\0\x01{",
        header(1)[:-1],
        header(1) + b"more",
        header({"object": 1}),
        header({"tuple": [], "dict": []}),
        header({}),
        header({"tuple": 3}),
        header({"dict": [[[1], 2]]}),
        header({"dict": [[1, 2, 3]]}),
        header({"array": 0}),
        header({"array": -1}, [["int8", [1]]], b"x"),
        header({"array": 0}, [["O", [1]]], bytes(8)),
        header({"array": 0}, [["object", [1]]], bytes(8)),
        header({"array": 0}, [["S1", [1]]], b"x"),
        header({"array": 0}, [["datetime64[s]", [1]]], bytes(8)),
        header({"array": 0}, [["int64", [10**12]]], bytes(8)),
        header({"array": 0}, [["int8", [-1, -8]]], bytes(8)),
        header({"array": 0}, [["int8", [True]]], b"x"),
        header({"array": 0}, [["int8", 1]], b"x"),
        header({"array": 0}, [[["int8"], [1]]], b"x"),
        header({"array": 0}, [["int8", [1]]], b"xx"),
        header({"array": 0}, {"int8": 1}, b"x"),
        header(9)[:4] + b"[" * 30,
        nested(65),
        nested(100_000),
        pickle.dumps([1]),
    ],
)
def test_bytes_of_another_schema_are_refused(data):
    with pytest.raises(MessageError):
        wire.decode(data)


def test_no_module_of_the_exchange_reads_pickles():
    for module in (connections, joining, wire):
        assert "pickle" not in vars(module)


# The secret


def test_the_secret_is_a_file_or_a_variable(tmp_path):
    file = tmp_path / "secret"
    file.write_text(f"  {'f' * 64}\n")
    variables = {"GSPAX_SECRET": "v" * 32, "OTHER": "1"}
    assert secret.read_secret("host", None, variables) == b"v" * 32 and variables == {"OTHER": "1"}, "not for children"
    assert secret.read_secret("host", str(file), {"GSPAX_SECRET": "v" * 32}) == b"f" * 64
    assert secret.read_secret("host", None, {"GSPAX_SECRET_FILE": str(file)}) == b"f" * 64
    assert len(secret.new_secret()) == 64 and secret.new_secret() != secret.new_secret()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("short", "wanted 16 to 4096 bytes, got 5"),
        ("x" * 5000, "wanted 16 to 4096 bytes"),
        (None, "cannot be read: No"),
    ],
)
def test_a_secret_that_is_none_is_named(content, message, tmp_path):
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        secret.read_secret("localhost", str(file), {})
    assert (content or "nothing") not in str(caught.value)


def test_only_a_loopback_address_needs_no_secret():
    for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1"):
        assert secret.read_secret(host, None, {}) == b""
    for host in ("10.0.0.1", "node", "localhost.example", "0.0.0.0", "::"):
        with pytest.raises(UserError, match="wanted --secret-file FILE, GSPAX_SECRET_FILE or GSPAX_SECRET"):
            secret.read_secret(host, None, {})


def test_a_loopback_coordinator_listens_on_loopback_only():
    assert joining.bind_host("localhost") == joining.bind_host("127.0.0.1") == "127.0.0.1"
    assert joining.bind_host("a-name") == joining.bind_host("192.0.2.1") == "", "no address of this host"
