"""Each check of a tiny model holds for a good one, and fails for the fault that it is for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mldebug.tiny.model._checks import Subject, run_checks
from mldebug.tiny.model._checks_config import check_diff, check_ids, differences
from mldebug.tiny.model._forward import loss_of

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip


def llama(**fields: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **fields})).eval()


def subject(model: Any, folder: Path, **fields: Any) -> Subject:
    model.save_pretrained(folder)
    source = transformers.LlamaConfig().to_dict() if "source" not in fields else fields.pop("source")
    changes = {path: (old, new) for path, old, new in differences(source, model.config.to_dict())}
    return Subject(model, folder, source, fields.pop("changes", changes), fields.pop("dtype", torch.float32), **fields)


def checks(*args: Any, **fields: Any) -> dict[str, Any]:
    return {check.name: check for check in run_checks(subject(*args, **fields))}


def failed(found: dict[str, Any]) -> list[str]:
    return [name for name, check in found.items() if check.ok is False]


def test_a_good_model_passes_all(tmp_path: Path) -> None:
    found = checks(llama(), tmp_path)
    assert list(found) == [
        "ids",
        "finite",
        "dtypes",
        "diff",
        "shapes",
        "reload",
        "forward",
        "generate",
        "backward",
        "loss",
    ]
    assert failed(found) == []
    assert "at 64 tokens" in found["forward"].why
    assert found["backward"].why == "all 21 parameters got a gradient"
    assert found["generate"].why.startswith("4 tokens: [")


def test_the_checks_leave_the_model_as_it_was(tmp_path: Path) -> None:
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    checks(model, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


class TestIds:
    def test_an_id_past_the_vocabulary(self, tmp_path: Path) -> None:
        found = checks(llama(eos_token_id=128009), tmp_path)
        assert found["ids"].ok is False and "eos_token_id = 128009 of 64" in found["ids"].why

    def test_one_of_a_list(self, tmp_path: Path) -> None:
        assert "eos_token_id = 70 of 64" in checks(llama(eos_token_id=[2, 70]), tmp_path)["ids"].why

    def test_one_in_generation_config_only(self, tmp_path: Path) -> None:
        model = llama()
        model.save_pretrained(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": 64}))
        ok, why = check_ids(model, tmp_path, {}, None)
        assert not ok and "generation_config.pad_token_id = 64 of 64" in why

    def test_one_of_a_nested_config(self, tmp_path: Path) -> None:
        class Nested:
            config = transformers.LlavaConfig(
                text_config={"model_type": "llama", **SIZES, "eos_token_id": 99}, image_token_id=32000
            )

        ok, why = check_ids(Nested, tmp_path, {}, None)
        assert not ok and "text_config.eos_token_id = 99 of 64" in why and "= 32000 of 64" in why

    def test_distinct_ids_that_became_one(self, tmp_path: Path) -> None:
        source = transformers.LlamaConfig(bos_token_id=1, eos_token_id=128009).to_dict()
        ok, why = check_ids(llama(bos_token_id=1, eos_token_id=1), tmp_path, source, None)
        assert not ok and why == "bos_token_id and eos_token_id were 1 and 128009, and are both 1"

    def test_ids_that_were_the_same_may_stay_so(self, tmp_path: Path) -> None:
        source = transformers.LlamaConfig(bos_token_id=5000, eos_token_id=5000).to_dict()
        assert check_ids(llama(bos_token_id=1, eos_token_id=1), tmp_path, source, None)[0]


def test_a_parameter_that_is_not_finite(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    found = checks(model, tmp_path)
    assert found["finite"].why == "not finite: model.norm.weight"
    assert found["forward"].ok is False


class TestDtypes:
    def test_another_than_asked(self, tmp_path: Path) -> None:
        found = checks(llama(), tmp_path, dtype=torch.bfloat16)
        assert found["dtypes"].ok is False and found["dtypes"].why.startswith("bfloat16 was asked for, but")

    def test_half_precision_is_kept(self, tmp_path: Path) -> None:
        found = checks(llama().to(torch.bfloat16), tmp_path, dtype=torch.bfloat16)
        assert failed(found) == [] and found["dtypes"].why == "bfloat16 (21)"


class TestDiff:
    SOURCE = transformers.LlamaConfig(rms_norm_eps=1e-5, tie_word_embeddings=True).to_dict()

    def test_a_field_lost_on_the_way(self) -> None:
        changes = {name: (0, 0) for name in (*SIZES, "head_dim")}
        ok, why = check_diff(llama(), self.SOURCE, changes)
        assert not ok and "rms_norm_eps 1e-05 became 1e-06" in why and "tie_word_embeddings True became False" in why

    def test_declared_sizes_are_fine(self) -> None:
        changes = {name: (0, 0) for name in (*SIZES, "head_dim")}
        ok, why = check_diff(llama(rms_norm_eps=1e-5, tie_word_embeddings=True), self.SOURCE, changes)
        assert ok and "all of them sizes" in why

    def test_differences_reach_into_nested_configs(self) -> None:
        found = list(differences({"a": {"b": 1, "c": [1, 2]}, "d": None}, {"a": {"b": 2, "c": (1, 2)}, "e": 3}))
        assert found == [("a.b", 1, 2), ("e", None, 3)]


class TestShapes:
    def test_a_head_dim_left_big(self, tmp_path: Path) -> None:
        model = llama(hidden_size=8, num_attention_heads=4, num_key_value_heads=4, head_dim=256)

        def reference() -> Any:
            with torch.device("meta"):
                return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2))

        found = checks(model, tmp_path, reference=reference)
        assert found["shapes"].ok is False
        assert "model.layers.0.self_attn.q_proj.weight (1024, 8) was (4096, 4096)" in found["shapes"].why

    def test_what_is_wide_in_the_source_may_be_wide(self, tmp_path: Path) -> None:
        fields = {"hidden_size": 8, "intermediate_size": 400}
        found = checks(llama(**fields), tmp_path, reference=lambda: llama(**fields))
        assert found["shapes"].ok and found["shapes"].why == "wide matrices are wide in the source too"

    def test_tables_of_a_vocabulary_are_left_out(self, tmp_path: Path) -> None:
        found = checks(llama(vocab_size=4000), tmp_path)
        assert found["shapes"].ok and found["shapes"].why.startswith("no matrix")


class TestReload:
    def test_the_class_of_the_auto_model_that_fills_tensors_in_anew(self, tmp_path: Path) -> None:
        """AutoModelForImageTextToText makes a classifier for ShieldGemma2 whose saved names do not come back."""
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 8,
        }
        text = {**SIZES, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
        config = transformers.ShieldGemma2Config(
            text_config=text,
            vision_config=vision,
            mm_tokens_per_image=4,
            image_token_id=9,
            boi_token_index=10,
            eoi_token_index=11,
        )
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config).eval()
        model.save_pretrained(tmp_path)
        found = {
            check.name: check for check in run_checks(Subject(model, tmp_path, config.to_dict(), {}, torch.float32))
        }
        again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
        truly_equal = not info["missing_keys"] and all(
            torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items()
        )
        assert found["reload"].ok is truly_equal
        if not truly_equal:
            assert "re-initialised" in found["reload"].why

    def test_a_tensor_lost_from_the_file(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        model = llama()
        given = subject(model, tmp_path)
        state = load_file(tmp_path / "model.safetensors")
        del state["model.norm.weight"]  # it comes back as ones, which is what it was
        save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        found = {check.name: check for check in run_checks(given)}
        assert found["reload"].why == "1 re-initialised: model.norm.weight"

    def test_a_bit_that_differs(self, tmp_path: Path) -> None:
        model = llama()
        given = subject(model, tmp_path)
        with torch.no_grad():
            model.model.norm.weight[0] = 1.0000001
        found = {check.name: check for check in run_checks(given)}
        assert found["reload"].why == "1 of 21 tensors differ: model.norm.weight"

    def test_ties_are_named(self, tmp_path: Path) -> None:
        found = checks(llama(tie_word_embeddings=True), tmp_path)
        assert "tied: lm_head.weight = model.embed_tokens.weight" in found["reload"].why

    def test_a_tie_that_does_not_come_back(self, tmp_path: Path) -> None:
        model = llama(tie_word_embeddings=True)
        given = subject(model, tmp_path)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        found = {check.name: check for check in run_checks(given)}
        assert "tied before: nothing; after: lm_head.weight = model.embed_tokens.weight" in found["reload"].why


def test_parameters_without_a_gradient_are_listed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(**{name: value for name, value in SIZES.items() if name != "num_key_value_heads"})
    model = transformers.BertForMaskedLM(config).eval()
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad_(False)
    model.bert.embeddings.LayerNorm.weight.requires_grad_(True)
    found = checks(model, tmp_path, source=config.to_dict())
    assert found["backward"].ok
    head = transformers.BertModel(config).eval()
    found = checks(head, tmp_path, source=config.to_dict())
    assert found["generate"].ok is None and found["generate"].why == "BertModel does not generate"


def test_a_forward_that_fails_fails_what_follows_too(tmp_path: Path) -> None:
    model = llama(hidden_size=56, num_attention_heads=7, num_key_value_heads=2, head_dim=8)
    found = checks(model, tmp_path)
    assert set(failed(found)) == {"forward", "backward", "loss"}
    assert "size of tensor" in found["forward"].why or "RuntimeError" in found["forward"].why


def test_a_loss_that_cannot_fall(tmp_path: Path) -> None:
    class Constant(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            if outputs.loss is not None:
                outputs.loss = outputs.loss * 0 + 1
            return outputs

    found = checks(Constant(transformers.LlamaConfig(**SIZES)).eval(), tmp_path)
    assert found["loss"].ok is False and found["loss"].why == "it does not fall: 1 to 1 in 30 steps"


@pytest.mark.parametrize(
    ("outputs", "value"),
    [
        ({"loss": torch.tensor(2.0), "logits": torch.ones(2)}, 2.0),
        ((torch.full((2, 2), 3.0, requires_grad=True), torch.ones(2, dtype=torch.long)), 9.0),
        ({"a": [torch.full((2,), 2.0, requires_grad=True)], "b": torch.ones(3)}, 4.0),
    ],
)
def test_one_number_to_go_backward_from(outputs: Any, value: float) -> None:
    assert float(loss_of(outputs)) == value


def test_no_number_without_a_gradient() -> None:
    assert loss_of({"logits": torch.ones(2)}) is None
