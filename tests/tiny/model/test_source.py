"""Where a config comes from, and what is said when it cannot be had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import MldebugError
from mldebug.tiny.model._source import resolve

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def folder(path: Path, **fields: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    return path


def test_type() -> None:
    source = resolve("llama")
    assert (source.kind, source.directory) == ("type", None)
    assert source.config["hidden_size"] == 4096
    assert source.sha256 == resolve("llama").sha256 != resolve("gpt2").sha256


def test_folder_has_its_own_values_and_the_defaults_of_the_rest(tmp_path: Path) -> None:
    source = resolve(folder(tmp_path / "m", hidden_size=1024, eos_token_id=[2, 3]))
    assert source.kind == "folder"
    assert source.directory == tmp_path / "m"
    assert (source.config["hidden_size"], source.config["eos_token_id"]) == (1024, [2, 3])
    assert source.config["num_hidden_layers"] == 32
    assert source.files == {"config.json"}


def test_file(tmp_path: Path) -> None:
    source = resolve(folder(tmp_path / "m") / "config.json")
    assert (source.kind, source.directory) == ("file", None)


def test_a_folder_comes_before_a_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "llama", hidden_size=512)
    monkeypatch.chdir(tmp_path)
    assert resolve("llama").config["hidden_size"] == 512


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("lama", "neither a folder nor a model type", "llama"),
        ("owner/nothing", "the cache of the hub has no model of this name (offline)", "./owner/nothing, or let it"),
        ("./nothing", "no such file", "config.json"),
        ("nothing/config.json", "no such file", "config.json"),
    ],
)
def test_nothing_of_that_name(name: str, message: str, hint: str) -> None:
    with pytest.raises(MldebugError) as caught:
        resolve(name)
    assert message in caught.value.message
    assert name in caught.value.message
    assert hint in caught.value.hint


def test_the_network_is_blamed_where_it_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: Any, **_options: Any) -> None:
        try:
            raise OSError(-2, "Name or service not known")
        except OSError as exc:
            raise FileNotFoundError("Got: ConnectError: check your internet connection") from exc

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    for offline in (None, False):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with pytest.raises(MldebugError) as caught:
            resolve("owner/nothing", offline=offline)
        assert "hub cannot be reached over the network (Name or service not known)" in caught.value.message
        assert "./owner/nothing" in caught.value.hint and "--offline" in caught.value.hint


def test_what_the_hub_says_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    for error, message, hint in (
        (RepositoryNotFoundError, "the hub has no model of this name", "hf auth login"),
        (GatedRepoError, "is gated", "ask on its page"),
    ):

        def fails(*_args: Any, _error: Any = error, **_options: Any) -> None:
            raise _error.__new__(_error)

        monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
        with pytest.raises(MldebugError) as caught:
            resolve("owner/nothing", offline=False)
        assert message in caught.value.message and hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "llama", ', "is no JSON"),
        ("[1, 2]", "holds a list"),
        ("{}", "names no model_type"),
        ('{"model_type": "lama"}', "does not know"),
        ('{"model_type": "llama", "hidden_size": "many"}', "is no config of a llama"),
        ("\x00\x01", "is no JSON"),
    ],
)
def test_broken_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(MldebugError) as caught:
        resolve(tmp_path)
    assert message in caught.value.message
    assert caught.value.hint


def test_folder_without_config(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(MldebugError, match=r"no config\.json: there is notes\.txt"):
        resolve(tmp_path)


def test_code_of_a_config_is_not_run_unasked(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(ran)!r}, 'w')\n")
    folder(tmp_path, model_type="mine", auto_map={"AutoConfig": "code.Config"})
    with pytest.raises(MldebugError, match="whose code comes with it") as caught:
        resolve(tmp_path)
    assert "--trust-remote-code" in caught.value.hint
    assert not ran.exists()


@pytest.mark.parametrize(
    ("name", "field"), [("esm", "vocab_size"), ("autoformer", "prediction_length"), ("hunyuan_v1_dense", "head_dim")]
)
def test_incomplete_defaults_are_completed_by_rule(name: str, field: str) -> None:
    source = resolve(name)
    assert source.config[field] == source.filled[field]


def test_incomplete_defaults_without_a_rule_name_the_field() -> None:
    with pytest.raises(
        MldebugError, match=r"default config of gemma4_assistant is incomplete: .*hidden_size_per_layer_input"
    ) as caught:
        resolve("gemma4_assistant")
    assert "config.json of a gemma4_assistant" in caught.value.hint
