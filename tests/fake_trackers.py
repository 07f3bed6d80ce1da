"""Stand-ins for the packages of trackers, with what gspax uses of them; `runs` has what each run was given."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace


class Record:
    """A run as a tracker has it."""

    def __init__(self, name):
        self.name, self.config, self.rows, self.report, self.ended, self.attempts = name, {}, [], None, 0, 1


def wandb(runs):
    def init(*, project, id, name, config, resume, allow_val_change, settings):
        assert (project, resume, allow_val_change) == ("gspax", "allow", True)
        record = runs.get(id)
        if record is None:
            record = runs[id] = Record(name)
        else:
            record.attempts += 1
        record.config = config

        def log(values):
            if "report" in values:
                record.report = values["report"]
            else:
                record.rows.append((values["step"], {key: value for key, value in values.items() if key != "step"}))

        def finish():
            record.ended += 1

        return SimpleNamespace(log=log, finish=finish, define_metric=lambda name, step_metric: None)

    def html(text, data_is_not_path):
        return text

    return {"init": init, "login": lambda prompt: not prompt, "Settings": lambda **_: None, "Html": html}


def trackio(runs):
    def init(*, project, name, config, resume, space_id, embed):
        assert (project, resume, space_id, embed) == ("gspax", "allow", None, False)
        title, _, id = name.rpartition("-")
        if id in runs:
            runs[id].attempts += 1
        record = runs.setdefault(id, Record(title))
        record.config = config

        def log(values, step):
            if "report" in values:
                record.report = values["report"]
            else:
                record.rows.append((step, values))

        def finish():
            record.ended += 1

        return SimpleNamespace(log=log, finish=finish)

    return {"init": init, "Html": lambda text: text}


def mlflow(runs):
    class MlflowClient:
        def get_experiment_by_name(self, name):
            return SimpleNamespace(experiment_id="1") if runs else None

        def create_experiment(self, name):
            assert name == "gspax" and not runs
            return "1"

        def search_runs(self, places, filter_string, max_results):
            id = filter_string.split("'")[1]
            if id in runs:
                runs[id].attempts += 1
            return [SimpleNamespace(info=SimpleNamespace(run_id=id))] if id in runs else []

        def create_run(self, place, tags, run_name):
            runs[tags["gspax_id"]] = Record(run_name)
            return SimpleNamespace(info=SimpleNamespace(run_id=tags["gspax_id"]))

        def update_run(self, id, status):
            assert status == "RUNNING"

        def log_batch(self, id, metrics=(), params=()):
            assert len(params) <= 100
            runs[id].config |= {key: value for key, value in params}
            if metrics:
                runs[id].rows.append((metrics[0][3], {key: value for key, value, _, _ in metrics}))

        def log_text(self, id, text, artifact_file):
            assert artifact_file == "report.html"
            runs[id].report = text

        def set_terminated(self, id, status):
            assert status == ("KILLED" if runs[id].report is None else "FINISHED")
            runs[id].ended += 1

    return {"MlflowClient": MlflowClient, "Metric": lambda *item: item, "Param": lambda *item: item}


FAKES = {"wandb": wandb, "trackio": trackio, "mlflow": mlflow}


def install(monkeypatch, name, **others):
    """Install the stand-in of a package, with other functions in some places. Its runs by id."""
    runs = {}
    for module in (name, f"{name}.entities"):
        made = ModuleType(module)
        made.__spec__ = ModuleSpec(module, None)
        vars(made).update(FAKES[name](runs) | others)
        monkeypatch.setitem(sys.modules, module, made)
    monkeypatch.delitem(sys.modules, f"gspax.run.trackers.{name}", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    return runs
