"""`--dist loadfile` of pytest-xdist, for a run that ends although a worker has died in it.

xdist hands on all files that a dead worker had, those without an open test too, and gives a new worker one file. A
worker runs its last test when it gets another one, so that in the end two workers wait for each other.
"""

import pytest
from xdist.scheduler import LoadFileScheduling


class FileSchedule(LoadFileScheduling):
    """Hands on only what is left of a dead worker's files, without the test in which it died."""

    def remove_node(self, node):
        units = self.assigned_work.pop(node)
        tests = [(unit, test) for unit in units.values() for test, is_done in unit.items() if not is_done]
        if not tests:
            return None
        unit, died = tests[0]
        unit[died] = True
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.nodes:
            self._reschedule(other)
        return died

    def _reschedule(self, node):
        """Assign files until more than two tests wait, or tell the worker that no file is left."""
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return FileSchedule(config, log) if config.getoption("dist") == "loadfile" else None
