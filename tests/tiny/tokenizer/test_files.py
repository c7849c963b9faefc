"""Tokenizers as the files of slow ones, bad files, and vocabularies learnt from a text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny import tiny_tokenizer
from mldebug.tiny.tokenizer._checks import check_tokenizer
from mldebug.tiny.tokenizer._load import load_tokenizers, load_transformers
from mldebug.tiny.tokenizer._ranks import _TEKKEN_SPECIALS, TekkenForm, as_bytes, as_characters
from mldebug.tiny.tokenizer._spm import SpmForm, fields
from tests.tiny.tokenizer import kit

pytest.importorskip("transformers")


def config(folder: Path, **keys: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    return folder


def model_of(folder: Path) -> Any:
    return json.loads((folder / "tokenizer.json").read_text())["model"]


def gpt2(folder: Path) -> Path:
    model = model_of(kit.byte_bpe(folder.with_name("as-json")))
    folder.mkdir(parents=True)
    vocab = {**model["vocab"], "<|endoftext|>": len(model["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    (folder / "merges.txt").write_text("\n".join(lines))
    return folder


def bert(folder: Path) -> Path:
    model = model_of(kit.wordpiece(folder.with_name("as-json")))
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in model["vocab"]))
    return folder


def gpt2_with_added(folder: Path) -> Path:
    gpt2(folder)
    size = len(json.loads((folder / "vocab.json").read_text()))
    added = {token: size + at for at, token in enumerate(["<pad>", "<a>", "two words"])}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    return config(
        folder, tokenizer_class="GPT2Tokenizer", pad_token="<pad>", additional_special_tokens=["<a>", "<later>"]
    )


def t5(folder: Path) -> Path:
    kit.sentencepiece_model(folder / "spiece.model", "unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    return config(folder, tokenizer_class="T5Tokenizer", extra_ids=100)


def llama(folder: Path) -> Path:
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "character_coverage": 0.98}
    kit.sentencepiece_model(folder / "tokenizer.model", "bpe", byte_fallback=True, **options)
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return config(folder, tokenizer_class="LlamaTokenizer", chat_template=kit.TEMPLATE, **roles)


def xlmr(folder: Path) -> Path:
    """Its ids are those of the model file, moved by one, with a mask at the end."""
    kit.sentencepiece_model(folder / "sentencepiece.bpe.model", "unigram")
    return config(folder, tokenizer_class="XLMRobertaTokenizer")


def marian(folder: Path) -> Path:
    kit.sentencepiece_model(folder / "source.spm", "unigram")
    shutil.copy(folder / "source.spm", folder / "target.spm")
    pieces = [token for token in SpmForm(folder / "source.spm").ids() if token not in ("<s>", "</s>", "<unk>")]
    vocab = {token: id for id, token in enumerate(["</s>", "<unk>", *pieces, "<pad>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    return config(folder, tokenizer_class="MarianTokenizer", source_lang="en", target_lang="de")


def tiktoken(folder: Path) -> Path:
    kit.tiktoken_file(folder / "tokenizer.model")
    table = {str(1000 + at): {"content": f"<|t{at}|>", "special": True} for at in range(4)}
    return config(folder, tokenizer_class="PreTrainedTokenizerFast", added_tokens_decoder=table, bos_token="<|t0|>")


def both_forms(folder: Path) -> Path:
    bert(folder)
    shutil.copy(folder.with_name("as-json") / "tokenizer.json", folder)
    return config(folder, tokenizer_class="BertTokenizer", do_lower_case=True)


SLOW: dict[str, tuple[Callable[[Path], Path], int | None]] = {
    "vocab.json and merges.txt": (gpt2, 257),
    "vocab.txt": (bert, None),
    "added_tokens.json": (gpt2_with_added, 257 + 4),
    "spiece.model, T5": (t5, None),
    "tokenizer.model, Llama": (llama, 260),
    "sentencepiece.bpe.model, XLM-R": (xlmr, None),
    "source.spm and vocab.json, Marian": (marian, None),
    "tokenizer.model of tiktoken": (tiktoken, 260),
    "tokenizer.json and vocab.txt": (both_forms, None),
}


@pytest.mark.parametrize("name", SLOW)
def test_files_of_slow_tokenizers(name: str, tmp_path: Path) -> None:
    make, floor = SLOW[name]
    source = make(tmp_path / "source")
    if floor is not None:
        with pytest.raises(UsageError, match=f"{floor:,} tokens"):
            tiny_tokenizer(source, floor - 1, tmp_path / "never")
    for size in (600, 700):
        report = tiny_tokenizer(source, size, tmp_path / str(size))
        assert report.ok, report.text()
        assert report.size == size and sorted(report.id_map.values()) == list(range(size))
        names = {path.name for path in source.iterdir()}
        assert {path.name for path in report.path.iterdir()} == {*names, "id_map.json"}


def test_the_forms_of_a_folder_agree(tmp_path: Path) -> None:
    report = tiny_tokenizer(both_forms(tmp_path / "source"), 600, tmp_path / "out")
    lines = (report.path / "vocab.txt").read_text().splitlines()
    assert {token: id for id, token in enumerate(lines)} == model_of(report.path)["vocab"]


def test_each_language_of_two_has_its_own_numbers(tmp_path: Path) -> None:
    source = gpt2(tmp_path / "source")
    vocab = json.loads((source / "vocab.json").read_text())
    (source / "vocab.json").rename(source / "vocab-src.json")
    (source / "vocab-tgt.json").write_text(json.dumps(dict(zip(vocab, reversed(vocab.values()), strict=True))))
    report = tiny_tokenizer(source, 500, tmp_path / "out")
    for name in ("vocab-src.json", "vocab-tgt.json"):
        assert sorted(json.loads((report.path / name).read_text()).values()) == list(range(500))


def test_a_single_file_is_enough(tmp_path: Path) -> None:
    source = kit.byte_bpe(tmp_path / "source")
    (source / "tokenizer.json").rename(tmp_path / "some-name.json")
    report = tiny_tokenizer(tmp_path / "some-name.json", 400, tmp_path / "out")
    assert report.ok and report.files == ("id_map.json", "tokenizer.json")
    words = gpt2(tmp_path / "gpt2") / "vocab.json"
    report = tiny_tokenizer(words, 400, tmp_path / "out2")
    assert report.ok and report.files == ("id_map.json", "merges.txt", "vocab.json")


def test_a_vocabulary_in_code_is_kept_whole(tmp_path: Path) -> None:
    source = config(tmp_path / "source", tokenizer_class="ByT5Tokenizer")
    with pytest.raises(UsageError, match="384 tokens: 384 tokens that its code makes"):
        tiny_tokenizer(source, 300, tmp_path / "never")
    report = tiny_tokenizer(source, 384, tmp_path / "out")
    assert report.ok and report.id_map == {id: id for id in range(384)}


def test_sentinels_of_t5_go_for_good(tmp_path: Path) -> None:
    source = t5(tmp_path / "source")
    report = tiny_tokenizer(source, 400, tmp_path / "out", drop_unused_added=True)
    assert report.ok, report.text()
    assert len(report.dropped) == 100
    assert json.loads((report.path / "tokenizer_config.json").read_text())["extra_ids"] == 0


def test_sentencepiece_keeps_what_it_does_not_know(tmp_path: Path) -> None:
    path = kit.sentencepiece_model(tmp_path / "a.model", "unigram")
    data = path.read_bytes() + b"\xa2\x06\x05hello"  # field 100
    path.write_bytes(data)
    form = SpmForm(path)
    (tmp_path / "out").mkdir()
    assert form.write(list(form.ids()), tmp_path / "out", None) == form.ids()
    assert (tmp_path / "out" / "a.model").read_bytes() == data
    form.write([token for token in form.ids() if len(token) < 3], tmp_path / "out", None)
    assert list(fields((tmp_path / "out" / "a.model").read_bytes()))[-1].value == b"hello"


def test_bytes_are_written_as_characters() -> None:
    every = bytes(range(256))
    assert as_bytes(as_characters(every)) == every
    assert as_characters(b" a\n") == "ĠaĊ"


def test_tekken_with_listed_special_tokens(tmp_path: Path) -> None:
    path = kit.tekken_file(tmp_path / "tekken.json")
    document = json.loads(path.read_text())
    names = [*_TEKKEN_SPECIALS, "[AUDIO]"]
    document["special_tokens"] = [{"rank": at, "token_str": name, "is_control": True} for at, name in enumerate(names)]
    path.write_text(json.dumps(document))
    assert len(TekkenForm(path).specials) == 30
    report = tiny_tokenizer(path, 277, tmp_path / "out", drop_unused_added=True)
    assert report.ok and report.size == 277 and len(report.dropped) == 9
    small = json.loads((report.path / "tekken.json").read_text())
    assert small["config"]["default_num_special_tokens"] == 21
    assert small["config"]["default_vocab_size"] == 277
    assert [row["rank"] for row in small["vocab"]] == list(range(256))


SCRATCH = ["byte-level BPE", "byte-fallback BPE", "Unigram", "WordPiece", "WordLevel", "tiktoken", "tekken"]


@pytest.mark.parametrize("kind", [*SCRATCH, "SentencePiece BPE", "SentencePiece Unigram"])
def test_a_vocabulary_from_a_text_in_the_pipeline_of_the_source(kind: str, tmp_path: Path) -> None:
    source = kit.MAKERS[kind](tmp_path / "source")
    text = tmp_path / "corpus.txt"
    text.write_text("\n".join(f"jabberwock number {at} outgrabe the mome raths" for at in range(80)) + "\n")
    size = 340 if kind not in ("Unigram", "WordPiece", "WordLevel", "SentencePiece Unigram") else 60
    report = tiny_tokenizer(source, size, tmp_path / "out", from_scratch=text)
    assert report.ok, report.text()
    assert report.size <= size and report.size > report.floor
    plain = {token.removeprefix("##").strip("▁Ġ") for token in _tokens(report.path)}
    learnt = {token for token in plain if token.isascii() and token.isalpha() and len(token) > 1}
    assert learnt and all(token in text.read_text() for token in learnt)
    if (source / "tokenizer.json").exists():
        old, new = (json.loads((at / "tokenizer.json").read_text()) for at in (source, report.path))
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            assert old[part] == new[part]
        contents = [[token["content"] for token in document["added_tokens"]] for document in (old, new)]
        assert sorted(contents[0]) == sorted(contents[1])


def _tokens(folder: Path) -> list[str]:
    if (folder / "tokenizer.json").exists():
        vocab = model_of(folder)["vocab"]
        return [item if isinstance(item, str) else item[0] for item in vocab]
    from mldebug.tiny.tokenizer._source import forms_in

    return list(forms_in(folder)[0].ids())


def test_a_text_that_the_source_does_not_know_is_no_fault(tmp_path: Path) -> None:
    """Characters are those of the text: a source that does not know them is nothing to compare with."""
    source = kit.sentencepiece_model(tmp_path / "source" / "spiece.model", "unigram", size=500).parent
    text = tmp_path / "text.txt"
    text.write_text("ճիշտ words ☃ of snow ☃☃\nsome words of text\n" * 30 + "ẞ\n")
    report = tiny_tokenizer(source, 100, tmp_path / "out", from_scratch=text)
    assert report.ok, report.text()
    assert {"☃", "ẞ"} <= set(_tokens(report.path))


def test_words_of_a_conversation_may_be_unknown_now(tmp_path: Path) -> None:
    source = kit.wordlevel(tmp_path / "source")
    written = json.loads((source / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m['content'] }} fox quick dog {% endfor %}"
    (source / "tokenizer_config.json").write_text(json.dumps({**written, "chat_template": template}))
    report = tiny_tokenizer(source, 5, tmp_path / "out")
    assert report.ok, report.text()


def test_from_scratch_says_what_is_wrong_with_the_text(tmp_path: Path) -> None:
    source = kit.byte_bpe(tmp_path / "source")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for name, words in (("nowhere.txt", "no such file"), ("empty.txt", "no text"), ("binary.txt", "UTF-8")):
        with pytest.raises(MldebugError, match=words):
            tiny_tokenizer(source, 400, tmp_path / "out", from_scratch=tmp_path / name)
    assert not (tmp_path / "out").exists()


BAD: dict[str, tuple[str, bytes, str]] = {
    "cut off": ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 0', "is no JSON: line 1"),
    "a list": ("tokenizer.json", b"[1, 2]", "no JSON object"),
    "no model": ("tokenizer.json", b'{"version": "1.0"}', "no model with a vocabulary"),
    "unknown model": ("tokenizer.json", b'{"model": {"type": "Morse", "vocab": {"a": 0}}}', "'Morse'"),
    "odd merge": (
        "tokenizer.json",
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]}}',
        "cannot load",
    ),
    "Git LFS": ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "is no JSON"),
    "no text": ("vocab.txt", b"\xff\xfe\x00\x01", "cannot read"),
    "empty words": ("vocab.txt", b"", "is empty"),
    "words of no ids": ("vocab.json", b'{"a": "b"}', "no table of tokens and ids"),
    "no model file": ("tokenizer.model", b"not a model", "no SentencePiece model"),
    "cut model file": ("tokenizer.model", b"\x0a\x20abc", "no SentencePiece model"),
    "bad ranks": ("a.tiktoken", b"IQ== 0\nnonsense\n", "line 2 is no token with its rank"),
    "no ranks": ("a.tiktoken", b"\n", "is empty"),
    "bad tekken": ("tekken.json", b'{"config": {}, "vocab": [{"rank": 0}]}', "is no tekken file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str, tmp_path: Path) -> None:
    file, data, words = BAD[name]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / file).write_bytes(data)
    with pytest.raises(MldebugError, match=words) as caught:
        tiny_tokenizer(tmp_path / "source", 400, tmp_path / "out")
    assert caught.value.hint and "\n" not in caught.value.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_sources_that_are_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.bin").write_bytes(b"\0\1\2")
    for source, words in (
        (tmp_path / "nowhere", "no such file or folder"),
        ("./nowhere", "no such file or folder"),
        ("", "the source is empty"),
        (tmp_path / "empty", "has no tokenizer: there is nothing"),
        (tmp_path / "weights.bin", "has no tokenizer"),
        ("nobody/nothing", "the cache of the hub has no tokenizer of this name"),
    ):
        with pytest.raises(MldebugError, match=words):
            tiny_tokenizer(source, 400, tmp_path / "out", offline=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["words.tiktoken", "spiece.model", "vocab.txt"])
def test_the_file_that_is_wrong_is_named_as_it_was_given(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("" if name == "vocab.txt" else "\n!!! x\n")
    with pytest.raises(MldebugError, match=str(path)):
        tiny_tokenizer(path, None, tmp_path / "out")


def test_a_vocabulary_without_a_token(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    with pytest.raises(MldebugError, match="without a token"):
        tiny_tokenizer(tmp_path, None, tmp_path / "out")


def test_lists_of_special_tokens_that_are_none(tmp_path: Path) -> None:
    source = kit.wordpiece(tmp_path / "source")
    for value in (7, "x", [None, 3], {"a": None}):
        (source / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": value}))
        try:
            tiny_tokenizer(source, None, tmp_path / f"out-{value}")
        except MldebugError:
            continue


def test_a_panic_of_the_library_is_a_check_that_failed(tmp_path: Path) -> None:
    source = kit.byte_bpe(tmp_path / "source")
    document = json.loads((source / "tokenizer.json").read_text())
    document["post_processor"]["processors"][1]["pair"][0]["SpecialToken"]["id"] = "not there"
    (source / "tokenizer.json").write_text(json.dumps(document))
    report = tiny_tokenizer(source, None, tmp_path / "out")
    assert report.path.is_dir()


def test_what_is_there_is_never_overwritten(tmp_path: Path) -> None:
    source = kit.byte_bpe(tmp_path / "source")
    for force in (False, True):
        with pytest.raises(UsageError, match="is where the source is"):
            tiny_tokenizer(source, 400, source, force=force)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        tiny_tokenizer(source, 400, tmp_path / "file")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("x")
    for force, words in ((False, "not empty"), (True, "holds no tiny tokenizer")):
        with pytest.raises(UsageError, match=words):
            tiny_tokenizer(source, 400, tmp_path / "mine", force=force)
    with pytest.raises(UsageError, match="no folder to write"):
        tiny_tokenizer(source, 400)
    (tmp_path / "fresh").mkdir()
    assert tiny_tokenizer(source, 400, tmp_path / "fresh").ok
    assert tiny_tokenizer(source, 420, tmp_path / "fresh", force=True).ok
    assert len(json.loads((tmp_path / "fresh" / "id_map.json").read_text())) == 420
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "fresh", "mine", "source"]


def _spoilt(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    document = json.loads((folder / "tokenizer.json").read_text())
    change(document)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return folder


def _no_begin(document: dict[str, Any]) -> None:
    document["post_processor"] = document["post_processor"]["processors"][0]


def _lower(document: dict[str, Any]) -> None:
    document["normalizer"] = {"type": "Lowercase"}


def _far(document: dict[str, Any]) -> None:
    vocab = document["model"]["vocab"]
    vocab[max(vocab, key=vocab.__getitem__)] = 5000


def _lost(document: dict[str, Any]) -> None:
    document["added_tokens"] = [token for token in document["added_tokens"] if token["content"] != "<|eot|>"]


@pytest.mark.parametrize(
    ("change", "check"),
    [(_no_begin, "special tokens"), (_lower, "round trip"), (_far, "ids"), (_lost, "chat template")],
)
def test_each_check_can_fail(change: Callable[[dict[str, Any]], None], check: str, tmp_path: Path) -> None:
    source = kit.byte_bpe(tmp_path / "source")
    report = tiny_tokenizer(source, 400, tmp_path / "out")
    if change is _lost:  # so that loading does not put it back
        names = ("tokenizer_config.json",)
        for name in names:
            keys = json.loads((report.path / name).read_text())
            keys.pop("added_tokens_decoder")
            (report.path / name).write_text(json.dumps(keys))
    _spoilt(report.path, change)
    checks = check_tokenizer(load_transformers(source), load_transformers(report.path), report.path, load_transformers)
    assert {each.name: each.ok for each in checks}[check] is False


def test_a_text_that_the_source_refuses_is_refused_as_well(tmp_path: Path) -> None:
    source = kit.wordpiece(tmp_path / "source")
    document = json.loads((source / "tokenizer.json").read_text())
    document["model"]["unk_token"] = "[nothing]"
    (source / "tokenizer.json").write_text(json.dumps(document))
    config(source, tokenizer_class="PreTrainedTokenizerFast")
    with pytest.raises(Exception, match="Missing"):
        load_transformers(source).encode("\u16a0\u16a2")
    report = tiny_tokenizer(source, 600, tmp_path / "out")
    assert report.ok, report.text()
    with pytest.raises(UsageError) as caught:
        tiny_tokenizer(source, 100, tmp_path / "never")
    assert "--from-scratch FILE takes only the characters of a text" in caught.value.hint


def test_a_reload_with_more_tokens_fails(tmp_path: Path) -> None:
    one, other = kit.byte_bpe(tmp_path / "one", 900), kit.byte_bpe(tmp_path / "other", 1000)
    loaded = load_tokenizers(one / "tokenizer.json")
    checks = check_tokenizer(loaded, loaded, one, lambda _: load_tokenizers(other / "tokenizer.json"))
    assert {each.name: each.ok for each in checks}["reload"] is False
