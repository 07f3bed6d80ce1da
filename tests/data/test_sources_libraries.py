"""Tables read by libraries: Parquet, Hugging Face datasets, tensorflow-datasets, Grain. No test uses the network."""

import json
import re
import subprocess
import sys
import types
from dataclasses import replace

import numpy as np
import pytest

from gspax import data
from gspax.errors import UserError, how_to_install

ROWS = [{"question": f"{i}+1?", "answer": str(i + 1), "level": i % 3} for i in range(100)]
SETTINGS = {"prompt": "question", "metadata": ("level",)}


def problems(source):
    """All of a source's problems, in its order."""
    return [source.train(i) for i in range(len(source.opened.train))] + [
        source.heldout(i) for i in range(len(source.opened.heldout))
    ]


@pytest.fixture
def expected():
    return problems(data.sequence(ROWS, **SETTINGS))


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_parquet(tmp_path, expected):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parts = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    parquet.write_table(arrow.Table.from_pylist(ROWS[:60]), parts[0], row_group_size=7)
    parquet.write_table(arrow.Table.from_pylist(ROWS[60:]), parts[1])
    source = data.parquet(*parts, **SETTINGS)
    assert problems(source) == expected
    moved = [part.rename(tmp_path / f"moved_{part.name}") for part in parts]
    assert data.parquet(*moved, **SETTINGS).opened.content == source.opened.content
    bad = data.parquet(*moved, prompt="level")
    with pytest.raises(UserError, match=r"100 of 100 rows \(\S*a\.parquet …, row 0 from 0: level: wanted a text"):
        bad.train(0)
    split = data.parquet(moved[0], heldout=moved[1], **SETTINGS)
    assert {split.heldout(i).prompt for i in range(40)} == {row["question"] for row in ROWS[60:]}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_files_in_a_bucket(form, tmp_path, bucket, expected):
    """Their problems and their hash are those of local files. They are read once, whatever happens to them later."""
    read, local = getattr(data, form), tmp_path / f"rows.{form}"
    if form == "jsonl":
        write_lines(local, ROWS)
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(ROWS), local)
    run, server = bucket
    path = run.parent / local.name
    path.write_bytes(local.read_bytes())
    source = read(str(path), **SETTINGS)
    assert source.opened.content == read(local, **SETTINGS).opened.content
    asked = server.count()
    path.unlink()
    assert problems(source) == expected and server.count()["GET"] == asked["GET"]
    with pytest.raises(UserError, match=rf"^{path}: cannot be read: .*[Nn]o "):
        read(str(path), **SETTINGS).train(0)


def test_a_file_that_is_not_parquet_is_one_error(tmp_path):
    pytest.importorskip("pyarrow")
    write_lines(tmp_path / "rows.parquet", ROWS)
    with pytest.raises(UserError, match=r"^\S*rows\.parquet: cannot be read: Could not open Parquet") as caught:
        data.parquet(tmp_path / "rows.parquet").train(0)
    assert "\n" not in str(caught.value)


@pytest.fixture
def hugging_face(tmp_path, monkeypatch):
    """The `datasets` library, offline and with its cache in a temporary folder."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


def test_a_folder_of_files_for_hugging_face(tmp_path, hugging_face, expected):
    folder = tmp_path / "mine"
    folder.mkdir()
    write_lines(folder / "train.jsonl", ROWS)
    write_lines(folder / "test.jsonl", [{"question": "9*9?", "answer": "81", "level": 0}])
    assert problems(data.huggingface(folder, **SETTINGS)) == expected
    source = data.huggingface(folder, heldout="test", **SETTINGS)
    assert source.heldout(0).answer == "81" and len(source.opened.train) == 100
    with pytest.raises(UserError, match=r"^\S*mine: cannot be read: Unknown split"):
        data.huggingface(folder, "dev").train(0)


def test_a_data_set_saved_by_hugging_face(tmp_path, hugging_face, expected):
    saved = hugging_face.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    hugging_face.DatasetDict({"train": saved}).save_to_disk(tmp_path / "several")
    one, several = (data.huggingface(tmp_path / name, **SETTINGS) for name in ("one", "several"))
    assert problems(one) == problems(several) == expected
    assert one.opened.content == several.opened.content
    with pytest.raises(UserError, match=r"several: wanted a split of train, got 'dev'$"):
        data.huggingface(tmp_path / "several", "dev").train(0)


def test_an_unknown_data_set_is_one_error(hugging_face):
    with pytest.raises(UserError, match=r"^nobody/nothing: cannot be read: ") as caught:
        data.huggingface("nobody/nothing").train(0)
    assert "\n" not in str(caught.value)


def test_the_cause_of_a_library_s_exception_is_told(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("An error occurred while generating the dataset") from TypeError("Couldn't cast\nto null")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=fail))
    with pytest.raises(UserError, match=r"generating the dataset \(.*\): TypeError: Couldn't cast to null$"):
        data.huggingface(tmp_path).train(0)


@pytest.fixture
def prepared(tmp_path):
    """A data set that tensorflow-datasets wrote as ArrayRecord."""
    pytest.importorskip("array_record")
    tfds = pytest.importorskip("tensorflow_datasets")
    write_lines(tmp_path / "rows.jsonl", ROWS)

    class Sums(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            text, number = tfds.features.Text(), tfds.features.Scalar(np.int32)
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict({"question": text, "answer": text, "level": number})
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i, line in enumerate((tmp_path / "rows.jsonl").read_text().splitlines()):
                yield i, json.loads(line)

    tfds.disable_progress_bar()
    Sums(data_dir=tmp_path, file_format="array_record").download_and_prepare()
    return tmp_path


def test_tensorflow_datasets_are_read_without_tensorflow(prepared):
    source = data.tfds("sums", data_dir=prepared, **SETTINGS)
    read = problems(source)
    assert {(each.prompt, each.answer, each.metadata["level"]) for each in read} == {
        (row["question"], row["answer"], row["level"]) for row in ROWS
    }
    assert "tensorflow" not in sys.modules
    assert replace(source).opened.content == source.opened.content
    part = data.tfds("sums", "train[:80%]", heldout="train[80%:]", data_dir=prepared, **SETTINGS)
    assert (len(part.opened.train), len(part.opened.heldout)) == (80, 20)
    with pytest.raises(UserError, match=r"^nothing: cannot be read: Dataset nothing not found"):
        data.tfds("nothing", data_dir=prepared).train(0)
    by_folder = data.tfds(str(prepared / "sums" / "1.0.0"), **SETTINGS)
    assert problems(by_folder) == read
    with pytest.raises(
        UserError, match=r"sums: wanted the folder of a prepared version with dataset_info.json, such as"
    ):
        data.tfds(str(prepared / "sums")).train(0)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("./none", "there is no such folder in the working directory "),
        ("a/b/c", "there is no such folder in the working directory "),
        ("/none", "there is no such folder$"),
        ("r/none", "there is a folder r here without a none$"),
    ],
)
def test_a_mistyped_folder_is_not_asked_from_the_hub(name, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r").mkdir()
    asked = types.SimpleNamespace(load_dataset=lambda *_, **__: pytest.fail("the Hub was asked"))
    monkeypatch.setitem(sys.modules, "datasets", asked)
    with pytest.raises(UserError, match=f"^{name}: wanted a folder or a name on the Hub, {why}"):
        data.huggingface(name).train(0)
    monkeypatch.setattr(asked, "load_dataset", lambda *_, **__: ROWS)
    assert problems(data.huggingface("openai/gsm8k", **SETTINGS))


def test_a_grain_data_set(expected):
    grain = pytest.importorskip("grain")
    assert problems(data.sequence(grain.MapDataset.source(ROWS), **SETTINGS)) == expected
    some = grain.MapDataset.source(ROWS).filter(lambda row: row["level"] == 0)
    source = data.sequence(some, on_bad="skip", **SETTINGS)
    assert {each.metadata["level"] for each in problems(source)} == {0}
    assert source.opened.notes == (
        "skipped 66 of 100 rows (row 1 from 0: wanted an object with columns, got None (66 rows))",
    )


@pytest.mark.parametrize(
    ("package", "open_source"),
    [
        ("pyarrow", lambda: data.parquet("x.parquet")),
        ("datasets", lambda: data.huggingface("x")),
        ("tensorflow_datasets", lambda: data.tfds("x")),
    ],
)
def test_a_missing_package_is_named(package, open_source, monkeypatch):
    source = open_source()  # reads nothing yet
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=re.escape(f"needs {package.replace('_', '-')} ({how_to_install('data')}): ")):
        source.train(0)


def test_importing_the_sources_imports_no_library():
    libraries = {"pyarrow", "datasets", "tensorflow_datasets", "array_record", "grain", "jax", "transformers"}
    code = f"import sys, gspax.data; print({libraries} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
