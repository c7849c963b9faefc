"""Processor files follow the sizes of a tiny config, in whichever form they give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mldebug.core.errors import MldebugError
from mldebug.tiny.model._processor import write_processor

VISION = {"vision_config": {"image_size": 28, "patch_size": 14, "spatial_merge_size": 1, "temporal_patch_size": 1}}


def written(tmp_path: Path, document: dict[str, Any], config: dict[str, Any], id_map: Any = None) -> dict[str, Any]:
    source, output = tmp_path / "source", tmp_path / "output"
    source.mkdir()
    output.mkdir()
    (source / "preprocessor_config.json").write_text(json.dumps(document))
    write_processor(source, output, config, id_map)
    found: dict[str, Any] = json.loads((output / "preprocessor_config.json").read_text())
    assert json.loads((source / "preprocessor_config.json").read_text()) == document
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"size": 336}, {"size": 28}),
        ({"size": {"height": 336, "width": 336}}, {"size": {"height": 28, "width": 28}}),
        ({"size": {"shortest_edge": 336}, "crop_size": 336}, {"size": {"shortest_edge": 28}, "crop_size": 28}),
        (
            {"size": {"shortest_edge": 3136, "longest_edge": 1003520}},
            {"size": {"shortest_edge": 784, "longest_edge": 784}},
        ),
        ({"min_pixels": 3136, "max_pixels": 12845056}, {"min_pixels": 784, "max_pixels": 784}),
        (
            {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2},
            {"patch_size": 14, "temporal_patch_size": 1, "merge_size": 1},
        ),
        (
            {"image_mean": [0.5], "do_resize": True, "resample": 3},
            {"image_mean": [0.5], "do_resize": True, "resample": 3},
        ),
        ({"image_processor": {"size": 336}}, {"image_processor": {"size": 28}}),
    ],
)
def test_images(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    assert written(tmp_path, before, VISION) == after


def test_clips_are_as_long_as_the_positions_and_whole_seconds(tmp_path: Path) -> None:
    before = {
        "chunk_length": 30,
        "feature_size": 80,
        "hop_length": 160,
        "n_samples": 480000,
        "nb_max_frames": 3000,
        "sampling_rate": 16000,
    }
    after = written(tmp_path, before, {"max_source_positions": 128, "num_mel_bins": 8})
    assert after["feature_size"] == 8 and after["nb_max_frames"] == 256
    assert after["chunk_length"] * 16000 == after["n_samples"] == 256 * after["hop_length"]


def test_the_width_of_a_waveform_stays(tmp_path: Path) -> None:
    assert written(tmp_path, {"feature_size": 1, "sampling_rate": 16000}, {"num_mel_bins": 8})["feature_size"] == 1


def test_ids_go_through_the_map(tmp_path: Path) -> None:
    assert written(tmp_path, {"image_token_id": 32000, "other_token_ids": [5, 7]}, VISION, {32000: 9, 5: 1}) == {
        "image_token_id": 9,
        "other_token_ids": [1, 7],
    }


def test_a_file_that_is_broken(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(MldebugError, match=r"cannot read .*preprocessor_config\.json"):
        write_processor(tmp_path, tmp_path, {}, None)
