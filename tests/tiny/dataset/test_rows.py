"""Which rows are taken: random, stratified, cover; the seed, the limits, and what was not seen."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter

import pytest

from mldebug.core.errors import UsageError
from mldebug.tiny import tiny_dataset
from tests.tiny.dataset.kit import load, picture, stored, write_lines

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


SORTED = [{"text": f"t{i}", "label": "a" if i < 700 else "b" if i < 990 else "c"} for i in range(1000)]


@pytest.fixture(params=["jsonl", "parquet", "saved"])
def sorted_source(request, tmp_path):
    if request.param == "jsonl":
        return write_lines(tmp_path / "a.jsonl", SORTED)
    if request.param == "parquet":
        datasets.Dataset.from_list(SORTED).to_parquet(tmp_path / "a.parquet", batch_size=100)
        return tmp_path / "a.parquet"
    datasets.Dataset.from_list(SORTED).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_sorted_labels(sorted_source, tmp_path) -> None:
    def labels(rows: str, n: int, **options) -> Counter[str]:
        tiny_dataset(sorted_source, n, tmp_path / "tiny", rows=rows, force=True, **options)
        return Counter(load(tmp_path / "tiny")["label"])

    assert labels("first", 10) == {"a": 10}
    assert labels("stratified", 10) == {"a": 7, "b": 2, "c": 1}
    assert labels("stratified", 100) == {"a": 70, "b": 29, "c": 1}
    assert labels("stratified", 3, by="label") == {"a": 1, "b": 1, "c": 1}
    assert set(labels("cover", 10)) == {"a", "b", "c"}
    assert labels("random", 300)["b"] > 50


def test_the_seed_decides_and_is_recorded(sorted_source, tmp_path) -> None:
    for rows in ("random", "stratified"):
        taken = []
        for number, seed in enumerate((1, 1, 2)):
            report = tiny_dataset(sorted_source, 20, tmp_path / f"{rows}{number}", rows=rows, seed=seed)
            taken.append(report.splits["train"].indices)
            record = json.loads((tmp_path / f"{rows}{number}" / "mldebug_dataset.json").read_text())
            assert record["seed"] == seed and record["splits"]["train"]["indices"] == list(taken[-1])
            assert f"Seed: {seed}" in (tmp_path / f"{rows}{number}" / "README.md").read_text()
        assert taken[0] == taken[1] != taken[2]
        files = [next((tmp_path / f"{rows}{number}").rglob("*.parquet")).read_bytes() for number in (0, 1)]
        assert files[0] == files[1]


def test_random_rows_are_spread_evenly(tmp_path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"a": i} for i in range(40)])
    seen: Counter[int] = Counter()
    for seed in range(60):
        report = tiny_dataset(source, 10, tmp_path / "tiny", rows="random", seed=seed, force=True)
        seen.update(report.splits["train"].indices)
    assert min(seen[i] for i in range(40)) >= 4 and max(seen.values()) <= 30  # 15 expected


def test_random_from_few_row_groups_where_all_are_too_large(tmp_path) -> None:
    rows = {"a": list(range(20_000)), "text": [f"{i:0100d}" for i in range(20_000)]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "a.parquet", batch_size=500)
    report = tiny_dataset(tmp_path / "a.parquet", 50, tmp_path / "tiny", rows="random", max_bytes=60_000)
    facts = report.splits["train"]
    assert facts.rows == 50 and len({index // 500 for index in facts.indices}) < 20
    assert any("row groups" in note and "60" in note for note in facts.notes)
    one = datasets.Dataset.from_dict(rows)
    one.to_parquet(tmp_path / "one.parquet", batch_size=20_000)
    report = tiny_dataset(tmp_path / "one.parquet", 50, tmp_path / "tiny1", rows="random", max_bytes=60_000)
    assert report.splits["train"].rows == 50 and report.splits["train"].indices[-1] < 20_000


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_random_lines_of_files_that_are_too_large(tmp_path, kind) -> None:
    (tmp_path / "set").mkdir()
    for shard in range(3):
        rows = [{"n": number} for number in range(20_000 * shard, 20_000 * shard + 20_000)]
        write_lines(tmp_path / "set" / f"train-{shard}.{kind}", rows)
    size = sum(path.stat().st_size for path in (tmp_path / "set").iterdir())
    report = tiny_dataset(tmp_path / "set", 300, tmp_path / "tiny", rows="random", max_bytes=size // 10)
    facts = report.splits["train"]
    texts = stored(load(tmp_path / "tiny"))
    taken = [row["n"] if kind == "jsonl" else json.loads(row["text"])["n"] for row in texts]
    assert taken == sorted(set(taken)) and len(taken) == 300
    assert all(any(low <= number < low + 10_000 for number in taken) for low in range(0, 60_000, 10_000))
    assert not facts.complete and any("random places" in note for note in facts.notes)
    assert any(note.startswith("not seen") for note in facts.notes) and 3000 < facts.seen < 9000


def test_random_lines_within_a_few_bytes(tmp_path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"a": i} for i in range(3)])
    assert tiny_dataset(source, 2, tmp_path / "tiny", rows="random", max_bytes=1).splits["train"].rows >= 1


ODD = [{"text": f"an ordinary text {i % 3}", "n": 1.0, "tags": ["x"], "flag": True, "label": i % 3} for i in range(600)]
ODD[100]["text"] = ""
ODD[110]["text"] = " \n"
ODD[120]["text"] = None
ODD[130]["text"] = "x"
ODD[140]["text"] = "long " * 500
ODD[150]["text"] = "naïve"
ODD[160]["n"] = None
ODD[170]["n"] = float("nan")
ODD[180]["n"] = float("-inf")
ODD[190]["tags"] = []
ODD[200]["tags"] = None
ODD[210]["tags"] = ["x", None]
ODD[220]["tags"] = ["x"] * 50
ODD[230]["flag"] = False
ODD[240]["label"] = 7
del ODD[250]["n"]


def test_cover_finds_each_kind_of_oddity(tmp_path) -> None:
    report = tiny_dataset(write_lines(tmp_path / "a.jsonl", ODD), 30, tmp_path / "tiny", rows="cover")
    facts = report.splits["train"]
    assert {100, 110, 120, 130, 140, 150, 160, 170, 180, 190, 200, 210, 220, 230, 240, 250} <= set(facts.indices)
    assert facts.rows == 30 and facts.complete and facts.seen == 600
    assert facts.covered["text is longest"] == 140 and facts.covered["label = 7"] == 240
    assert facts.covered["n is missing"] == 250
    text = report.text()
    assert "text is empty: 100" in text
    # The same through Parquet, where a key that is missing is None.
    datasets.Dataset.from_list([{**{"n": None}, **row} for row in ODD]).to_parquet(tmp_path / "a.parquet")
    again = tiny_dataset(tmp_path / "a.parquet", 30, tmp_path / "tiny2", rows="cover")
    assert set(facts.indices) - {250} <= {*again.splits["train"].indices, *range(30)}


def test_cover_with_too_few_rows_says_what_is_left_out(tmp_path) -> None:
    report = tiny_dataset(write_lines(tmp_path / "a.jsonl", ODD), 4, tmp_path / "tiny", rows="cover")
    facts = report.splits["train"]
    assert facts.rows == 4 and any(note.startswith("4 rows have no room for: ") for note in facts.notes)


def test_cover_of_pictures_and_classes(tmp_path) -> None:
    modes = ["RGB"] * 40 + ["L", "RGBA", "P", "1"]
    rows = {"image": [{"bytes": picture(mode), "path": None} for mode in modes] + [None], "label": [0] * 44 + [2]}
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
    data = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    data.to_parquet(tmp_path / "a.parquet")
    report = tiny_dataset(tmp_path / "a.parquet", 7, tmp_path / "tiny", rows="cover")
    facts = report.splits["train"]
    assert {40, 41, 42, 43, 44} <= set(facts.indices)
    assert "no row was seen with label = b" in facts.notes


@pytest.mark.parametrize(
    ("limit", "said"), [({"max_rows": 100}, "100 rows"), ({"max_bytes": 5000}, "5.0 kB"), ({"max_seconds": 1e-6}, "s")]
)
@pytest.mark.parametrize("rows", ["cover", "stratified", "random"])
def test_limits_are_kept_and_said(tmp_path, limit, said, rows) -> None:
    source = write_lines(tmp_path / "a.jsonl", ODD)
    report = tiny_dataset(source, 5, tmp_path / "tiny", rows=rows, **limit)
    facts = report.splits["train"]
    assert facts.seen <= 100 and not facts.complete and facts.rows >= 1
    assert any(note.startswith("not seen: ") and said in note for note in facts.notes)
    assert "not seen" in report.text()


def test_cover_of_parquet_keeps_the_limit_and_knows_how_much_there_is(tmp_path) -> None:
    datasets.Dataset.from_dict({"a": list(range(5000))}).to_parquet(tmp_path / "a.parquet", batch_size=100)
    report = tiny_dataset(tmp_path / "a.parquet", 5, tmp_path / "tiny", rows="cover", max_rows=1000)
    assert any("4,000 more rows" in note for note in report.splits["train"].notes)


def test_stratified_needs_labels(tmp_path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"a": 1, "b": {"kind": i % 2}} for i in range(10)])
    with pytest.raises(UsageError, match="no column of labels") as caught:
        tiny_dataset(source, 5, tmp_path / "tiny", rows="stratified")
    assert "a, b" in caught.value.hint
    tiny_dataset(source, 4, tmp_path / "tiny", rows="stratified", by="b.kind")
    assert Counter(row["b"]["kind"] for row in stored(load(tmp_path / "tiny"))) == {0: 2, 1: 2}
    with pytest.raises(UsageError, match="no column 'c'"):
        tiny_dataset(source, 5, tmp_path / "no", rows="stratified", by="c")


def test_more_labels_than_rows(tmp_path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"label": i} for i in range(20)])
    report = tiny_dataset(source, 5, tmp_path / "tiny", rows="stratified")
    assert report.splits["train"].rows == 5 and any("20 labels" in note for note in report.splits["train"].notes)


@pytest.mark.parametrize("rows", ["first", "random", "cover"])
def test_ctrl_c_writes_what_was_found(tmp_path, rows) -> None:
    def endless(stop_at: int):
        for number in range(10**9):
            if number == stop_at:
                signal.raise_signal(signal.SIGINT)
            yield {"a": number}

    source = datasets.IterableDataset.from_generator(endless, gen_kwargs={"stop_at": 50})
    n = 10**6 if rows == "first" else 5
    report = tiny_dataset(source, n, tmp_path / rows, rows=rows)
    facts = report.splits["train"]
    assert report.interrupted and "interrupted" in report.text() and 49 <= facts.seen <= 52
    assert any("it was interrupted" in note for note in facts.notes)
    assert len(load(tmp_path / rows)) == facts.rows > 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_all(tmp_path) -> None:
    def none_yet():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        yield {"a": 1}

    with pytest.raises(KeyboardInterrupt):
        tiny_dataset(datasets.IterableDataset.from_generator(none_yet), 5, tmp_path / "tiny", rows="cover")
    assert list(tmp_path.iterdir()) == []


def test_progress_is_told(tmp_path) -> None:
    def slow():
        for number in range(60):
            time.sleep(0.02)
            yield {"a": number}

    told: list[str] = []
    source = datasets.IterableDataset.from_generator(slow)
    tiny_dataset(source, 5, tmp_path / "tiny", rows="random", progress=told.append)
    assert told and all(text.startswith("looked at ") for text in told)
