"""An HTTP server on loopback, in a thread of the test."""

import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # connections that wait to be accepted; more are reset

    def handle_error(self, *arguments):
        """A client that hangs up is no error."""


@contextmanager
def serve(handler, port=0, **attributes):
    """A server with this class of handlers until the block ends, on a free port by default.

    Args:
      attributes: what handlers read of their `server`.
    """
    with _Server(("127.0.0.1", port), handler) as server:
        vars(server).update(attributes)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
