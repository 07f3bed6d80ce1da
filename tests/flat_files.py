"""A storage in one file: whole files under one folder, as a store of objects has them, without a server.

A folder is there while files are in it, nothing is renamed, no file grows, and a size is found by reading.
"""

import contextlib
import tempfile
from pathlib import Path

from gspax.storage.local import Local


class FlatFiles(Local):
    """The files below `root`."""

    has_folders, has_links, has_sizes, appends = False, False, False, False
    readers = 1

    def __init__(self, root):
        self.root = root

    def holds(self, path):
        return Path(path).is_relative_to(self.root)

    def write(self, path, data, *, private=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def create(self, path, data):
        if path.exists():
            raise FileExistsError(f"{path} exists")
        self.write(path, data)

    def append(self, path, data):
        self.write(path, (path.read_bytes() if path.exists() else b"") + data)

    def move(self, path, target):
        assert path.is_file(), "a folder is not renamed"
        super().move(path, target)

    @contextlib.contextmanager
    def build(self, target, last):
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
            for name in sorted(self.list(Path(folder)), key=lambda name: (name in last, name)):
                self.write(target / name, Path(folder, name).read_bytes())

    def folders(self, folder, holding=""):
        names = [Path(name).parts for name in self.list(folder)]
        return {head for head, *rest in names if rest and holding in ("", "/".join(rest))}

    def size(self, path):
        return None
