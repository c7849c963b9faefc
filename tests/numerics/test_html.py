"""The page: what it says first, that it is whole and small, that no text of a run becomes markup, how it looks."""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mldebug import Event, MldebugError, NumericsReport
from mldebug.numerics._event import Operation
from mldebug.numerics.ops._operands import Operand
from mldebug.numerics.page._html import page
from mldebug.numerics.page._html_grid import FIRST, INF, MAX_CELLS, MAX_COLUMNS, ZERO, grid_of
from mldebug.numerics.page._html_grid import NAN as NAN_CODE
from mldebug.numerics.page._html_picture import FAR, INF_COLOR, NAN_COLOR, pictures, shade

from .browser import Browser
from .kit import INF as INFINITE
from .kit import NAN, Net, train, watch

Run = Callable[..., "subprocess.CompletedProcess[str]"]

OPERATION = Operation(
    op="aten.exp", file="/home/user/attention.py", line=212, function="Attention.forward",
    code='w = torch.exp(s) if s.max() < 88 & "x" else s', cause="exp overflow",
    operands=(Operand("self", (4, 16), "float16", -3.25, 14.9), Operand("dim", value="-1")),
    results=(Operand("result", (4, 16), "float16", 0.04, 65504.0, 37),),
)  # fmt: skip
EVENT = Event(
    step=2, batch=5, micro_batch=1, phase="forward", module="layer.40", module_class="Attention", role="output",
    kind="inf", name="output", dtype="float16", limit=65504.0, op="aten.exp", operation=OPERATION, bad=37, numel=64,
)  # fmt: skip


def made_up(rows: int = 60, batches: int = 6, **more: Any) -> NumericsReport:
    series = {
        f"layer.{i} output": [(b, 2.0 ** ((i * 7 + b) % 15)) for b in range(batches) if b or i % 50]
        for i in range(rows)
    }
    if f"{EVENT.module} output" in series:
        series[f"{EVENT.module} output"][-1] = (batches - 1, INFINITE)
    fields: dict[str, Any] = {
        "event": EVENT, "series": series, "batches": batches, "steps": batches // 2,
        "reading": "exp of 14.9 is too much",
        "dtypes": dict.fromkeys(series, "float16"), "batch_steps": {b: b // 2 for b in range(batches)},
        "hint": "subtract the largest first", "frames": ["   layer.40 Attention\n2.6e-06      inf output"],
        "frames_from": "replay", "history": [{"step": 2, "loss": NAN, "absmax": 3.0, "where": "layer.3 output"}],
        "notes": ["a note"],
    }  # fmt: skip
    return NumericsReport(**{**fields, **more})


class Reader(HTMLParser):
    """Tags with their attributes' names, and the text outside scripts and styles."""

    def __init__(self, document: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[tuple[str, ...]] = Counter()
        self.parts: list[str] = []
        self._quiet = False
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags[(tag, *(name for name, _ in attrs))] += 1
        self._quiet = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._quiet = False

    def handle_data(self, data: str) -> None:
        if not self._quiet:
            self.parts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.parts)


def test_the_answer_comes_first_and_then_what_to_do() -> None:
    report = made_up()
    text = Reader(page(report)).text
    wanted = [
        report.verdict, report.reading, "subtract the largest first", "2 (batch 5, micro-batch 1)", "forward",
        "layer.40 (Attention)", "aten.exp", "/home/user/attention.py:212, in Attention.forward", "exp overflow",
        OPERATION.code, "self", "4×16", "-3.25 .. 14.9", "result", "37 of 64", "abs max and headroom: 60 tensors",
        "Frames", "layer.40 Attention", "Last steps", "layer.3 output", "a note",
    ]  # fmt: skip
    places, after = [], 0
    for piece in wanted:
        assert piece in text[after:], f"{piece!r} does not come after {places}"
        after = text.index(piece, after)
        places.append(piece)


def test_a_page_loads_nothing_and_is_whole() -> None:
    document = page(made_up())
    assert document.isascii()
    assert not re.search(r"(?:src|href|url\(|@import)[\s=(\"']*(?:https?:|//|file:)", document)
    assert "connect-src" not in document and "default-src 'none'" in document
    assert document.startswith("<!doctype html>") and document.rstrip().endswith("</html>")


def test_healthy_runs_runs_without_batches_and_gradients_have_a_page() -> None:
    assert "no nan, no inf in 6 forward passes" in Reader(page(made_up(event=None, frames=[]))).text
    assert "no model was called" in Reader(page(NumericsReport())).text
    assert "<script" not in page(NumericsReport())
    gradient = replace(EVENT, role="gradient", name="gradient", phase="backward", operation=None, op=None)
    grid = grid_of(made_up(event=gradient))
    assert grid is not None and grid.event == (40, 5)  # the output of its module
    outside = grid_of(made_up(event=replace(gradient, module=None)))
    assert outside is not None and outside.event is None


NASTY = st.text(min_size=1, max_size=40) | st.sampled_from(
    [
        "</script><script>alert(1)</script>",
        "<!--",
        "]]>",
        '"><img src=x onerror=alert(1)>',
        "&lt;",
        "\ud800",
        "a\nb\0",
        "'",
    ]
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=NASTY, code=NASTY, where=NASTY)
def test_no_text_of_a_run_becomes_markup(name: str, code: str, where: str) -> None:
    def built(name: str, code: str, where: str) -> str:
        operand = Operand(name, (2,), where, 0.0, 1.0, 1)
        operation = Operation(op=code, node=name, forward_op=where, file=name, line=1, function=code, code=code,
                              operands=(operand, Operand(name, value=code)), cause=where)  # fmt: skip
        event = replace(EVENT, module=name, module_class=where, name=code, dtype=where, op=name, operation=operation)
        series = {f"{name} {code}": [(5, 1.0)], f"<b>{where}": [(5, 2.0)]}
        return page(made_up(
            event=event, series=series, dtypes={}, reading=code, hint=where, notes=[name, code], frames=["f"],
            history=[{"step": 1, "where": name, "event": code}],
        ))  # fmt: skip

    found, plain = Reader(built(name, code, where)), Reader(built("name", "code", "where"))
    assert found.tags == plain.tags
    assert len(re.findall("<script", built(name, code, where))) == 3
    for text in (name, code, where):
        seen = "".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in text)
        assert seen in found.text


def test_frames_are_escaped_and_their_bad_lines_stand_out() -> None:
    frames = ["          a<b> Linear\n1.0e+00 2.0e+00 weight\n2.6e-06      inf output <i>"]
    document = page(made_up(frames=frames))
    assert "a&lt;b&gt; Linear" in document
    assert re.findall(r'<b class="bad">(2\.6e-06[^<]*)</b>', document) == ["2.6e-06      inf output &lt;i&gt;"]


def unpacked(document: str) -> tuple[dict[str, Any], Any, list[str]]:
    """What the page's script reads: (data, codes, names)."""
    found = re.search(r'id="map-data">(.*?)</script>', document, re.S)
    assert found is not None
    data = json.loads(found[1])
    block = {key: zlib.decompress(base64.b64decode(data[key])) for key in ("cells", "names", "dtypes")}
    names = block["names"].decode().split("\n")
    codes = np.frombuffer(block["cells"], dtype=np.uint8).reshape(data["rows"], len(data["batches"]))
    data["dtypes"] = [data["kinds"][i] for i in block["dtypes"]]
    return data, codes, names


def test_the_map_has_every_value_to_a_share_of_a_power_of_two() -> None:
    series = {
        "a output": [(3, 2.0**-20), (4, NAN), (4, 1.0)],
        "b": [(3, 0.0), (4, INFINITE)],
        "c": [(4, 3e4), (4, 7.0)],
    }
    report = NumericsReport(
        series=series, dtypes={"a output": "bfloat16", "c": "float16"}, batch_steps={3: 1}, batches=2
    )
    data, codes, names = unpacked(page(report))
    assert names == ["a output", "b", "c"]
    assert data["batches"] == [3, 4] and data["steps"] == [1, None]
    assert codes.tolist()[0][1] == NAN_CODE and codes.tolist()[1] == [ZERO, INF] and codes.tolist()[2][0] == 0
    for code, value in ((codes[0, 0], 2.0**-20), (codes[2, 1], 3e4)):
        assert data["low"] + (int(code) - FIRST) * data["unit"] == pytest.approx(math.log2(value), abs=data["unit"])
    assert data["unit"] < 0.15
    assert [limit for _, limit in data["dtypes"]] == [pytest.approx(128, abs=0.01), None, pytest.approx(16, abs=0.01)]


@pytest.mark.parametrize("at", [0, 50, 999], ids=str)
def test_where_batches_are_left_out_that_of_the_event_is_not(at: int) -> None:
    series = {f"m{i} output": [(b, float(b + 1)) for b in range(1000)] for i in range(3)}
    grid = grid_of(NumericsReport(event=replace(EVENT, module="m1", batch=at), series=series))
    assert grid is not None and grid.event is not None
    assert len(grid.batches) == MAX_COLUMNS and grid.total == 1000
    assert grid.batches[grid.event[1]] == at
    assert grid.batches == list(range(grid.batches[0], grid.batches[0] + MAX_COLUMNS))


@pytest.fixture(scope="module")
def large() -> NumericsReport:
    """10,000 tensors, 200 steps, and nothing in them that could be packed well."""
    random = np.random.default_rng(0)
    values = np.exp2(random.uniform(-20, 15.5, (10_000, 200)))
    series = {
        f"model.encoder.layers.{i // 25}.block.{i % 5}.attention.projection_{i} output": list(enumerate(row))
        for i, row in enumerate(values.tolist())
    }
    names = list(series)
    series[names[6200]][-1] = (199, INFINITE)
    event = replace(EVENT, module=names[6200].split()[0], batch=199, step=199)
    steps = {b: b for b in range(200)}
    return NumericsReport(
        event=event, series=series, batches=200, dtypes=dict.fromkeys(names, "float16"), batch_steps=steps
    )


@pytest.fixture(scope="module")
def large_page(large: NumericsReport) -> str:
    return page(large)


def test_a_page_of_10000_tensors_and_200_steps_stays_below_3_megabytes(large_page: str) -> None:
    assert MAX_CELLS >= 200 * 10_000
    assert len(large_page) < 3_000_000
    data, codes, _ = unpacked(large_page)
    assert codes.shape == (10_000, 200)
    assert codes[6200, 199] == INF and data["event"] == [6200, 199]


def pixels(url: str) -> Any:
    from PIL import Image

    data = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    return np.asarray(Image.open(BytesIO(data)).convert("RGBA"))


def rgb(color: str) -> list[int]:
    return [int(color[i : i + 2], 16) for i in (1, 3, 5)]


def test_one_bad_cell_of_two_million_is_seen_in_the_small_picture(large: NumericsReport) -> None:
    grid = grid_of(large)
    assert grid is not None
    for picture in map(pixels, pictures(grid)):
        assert picture.shape[0] <= 300 and picture.shape[1] == 200
        (place,) = np.argwhere((picture[:, :, :3] == rgb(INF_COLOR)).all(axis=2))
        assert place.tolist() == [6200 * picture.shape[0] // 10_000, 199]


def test_headroom_is_bright_where_little_is_left_and_what_did_not_run_is_transparent() -> None:
    series = {"a": [(0, 65504.0), (1, 2.0**-4)], "b": [(1, 2.0**-30)], "c": [(0, 5.0), (1, NAN)]}
    grid = grid_of(NumericsReport(series=series, dtypes={"a": "float16", "b": "float16"}))
    assert grid is not None
    absmax, headroom = map(pixels, pictures(grid))
    assert headroom[0, 0].tolist() == [*shade(1.0), 255]
    assert headroom[0, 1].tolist() == headroom[1, 1].tolist() == [*shade(0.0), 255]
    assert absmax[1, 0, 3] == headroom[1, 0, 3] == 0
    assert headroom[2, 0, 3] == 0 and absmax[2, 0, 3] == 255  # its dtype is not known
    assert absmax[2, 1, :3].tolist() == rgb(NAN_COLOR)
    assert grid.headroom()[0].tolist() == [pytest.approx(0, abs=0.3), pytest.approx(FAR + 4, abs=0.3)]


# Machado, Oliveira, Fernandes 2009, "A physiologically-based model for simulation of color vision deficiency", for the
# full deficiency: linear RGB as it looks to protanopes, deuteranopes and tritanopes.
SIGHT = {
    "full": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(color: Any, sight: str) -> Any:
    """CIE L*a*b* of an sRGB colour as it looks to somebody."""
    part = np.asarray(color) / 255
    linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(SIGHT[sight]) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    x, y, z = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], 1e-9))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", list(SIGHT))
def test_inf_and_nan_differ_from_every_number_for_all_kinds_of_sight(sight: str) -> None:
    scale = [lab(shade(i / 50), sight) for i in range(51)]
    inf, nan = lab(rgb(INF_COLOR), sight), lab(rgb(NAN_COLOR), sight)
    assert min(float(np.linalg.norm(one - bad)) for one in scale for bad in (inf, nan)) > 20  # 2.3 can just be told
    assert float(np.linalg.norm(inf - nan)) > 50
    light = [float(one[0]) for one in scale]
    assert all(after > before - 0.6 for before, after in pairwise(light))


def test_a_real_run_has_its_dtypes_and_steps() -> None:
    model = Net()
    report = watch(model, lambda: train(model, {5: NAN}, steps=4, micro=2))
    assert report.dtypes == dict.fromkeys(report.series, "float32") != {}
    assert report.batch_steps == {b: b // 2 for b in range(6)}
    assert not {"dtypes", "batch_steps", "series"} & set(report.to_dict())
    grid = grid_of(report)
    assert grid is not None and grid.event is not None
    assert grid.names[grid.event[0]] == "plant output" and grid.steps[grid.event[1]] == 2


def test_headroom_is_that_of_the_dtype_of_each_tensor() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.wide = torch.nn.Identity(), torch.nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wide(self.narrow(x.half() * 0 + 256).float())

    model = Mixed()
    grid = grid_of(watch(model, lambda: model(torch.ones(3))))
    assert grid is not None
    left = dict(zip(grid.names, grid.headroom()[:, 0].tolist(), strict=True))
    assert left["narrow output"] == pytest.approx(8, abs=0.01)
    assert left["wide output"] == pytest.approx(120, abs=0.01)


def test_html_writes_the_page_that_it_returns_or_says_why_not(tmp_path: Path) -> None:
    report = made_up()
    document = report.html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="ascii") == document == report.html()
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(MldebugError, match="cannot write") as caught:
        report.html(tmp_path / "nowhere" / "page.html")
    assert "folder that exists" in caught.value.hint


SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
for i in range(3):
    x = torch.ones(2, 4)
    if i == 2:
        x, model[0].weight.data = x * 3e38, torch.full((4, 4), 9.0)
    model(x)
"""


def command(run_torch: Run, tmp_path: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    return run_torch("-m", "mldebug", "overflow", *options, "--", "train.py", cwd=tmp_path, env=env, timeout=100)


def test_the_command_writes_a_page_of_each_rank(run_torch: Run, tmp_path: Path) -> None:
    done = command(run_torch, tmp_path, "--html", "report.html", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert done.returncode == 1 and "inf in the output" in done.stderr
    text = Reader((tmp_path / "report.rank1.html").read_text()).text
    assert "inf in the output of 0 (Linear), step 0, forward, rank 1" in text
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written_is_said_before_the_run(run_torch: Run, tmp_path: Path) -> None:
    done = command(run_torch, tmp_path, "--html", "no/such/report.html")
    assert done.returncode == 2
    assert "--html no/such/report.html: there is no folder" in done.stderr


# In a browser.


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    found = Browser(tmp_path)
    yield found
    found.close()


def count_color(path: Path, color: str) -> int:
    from PIL import Image

    with Image.open(path) as image:
        return int((np.asarray(image.convert("RGB")) == rgb(color)).all(axis=2).sum())


LOOK = """
const $=(id)=>document.getElementById(id);
const set=(id,value)=>{$(id).value=value;$(id).dispatchEvent(new Event("input"))};
const key=(name)=>$("scroll").dispatchEvent(new KeyboardEvent("keydown",{key:name}));
const names=()=>[...$("rows").children].map((span)=>span.title);
const at=(x,y,kind)=>{const box=$("cells").getBoundingClientRect();
$("cells").dispatchEvent(new MouseEvent(kind,{clientX:box.left+x,clientY:box.top+y}))};
"""


def test_ten_thousand_tensors_can_be_read_in_a_browser(browser: Browser, large_page: str) -> None:
    (start, event, spans, wide, fit, pinned, count, only, near, at_left, least) = browser.told(
        large_page,
        LOOK
        + """
        tell($("readout").textContent);
        tell(names().includes("model.encoder.layers.248.block.0.attention.projection_6200 output"));
        tell($("rows").children.length);
        tell(document.documentElement.scrollWidth<=innerWidth);
        tell($("rows").getBoundingClientRect().left>=0&&$("cells").getBoundingClientRect().right<=innerWidth);
        at(20,8,"mousemove");tell($("readout").textContent);
        set("filter","layers.77. projection_19");tell($("count").textContent);tell(names().join());
        key("ArrowDown");key("ArrowDown");tell($("readout").textContent);key("ArrowLeft");tell($("readout").textContent);
        set("filter","");set("order","near");tell(names()[0]);
        """,
        width=800,
    )
    why = browser.kept
    assert start.endswith("step 199, batch 199: inf") and "projection_6200" in start, why(large_page, start, 800)
    assert event == "true" and int(spans) < 100, why(large_page, spans, 800)
    assert wide == fit == "true", why(large_page, "it is wider than the window", 800)
    assert re.search(r"projection_\d+ output \(float16\)\nstep \d+, batch \d+: abs max \S+, headroom", pinned), pinned
    assert count == "25 of 10000 tensors" and len(only.split(",")) == 25, count
    assert "projection_1926" in near and "step 199" in near, near
    assert "projection_1926" in at_left and "step 198" in at_left, at_left
    assert "projection_6200" in least, least


@pytest.mark.parametrize("width", [800, 1280], ids=str)
def test_a_page_looks_right(browser: Browser, width: int) -> None:
    document = page(made_up(rows=60))
    dark = width == 800
    picture = browser.picture(document, width, dark=dark)
    background = "#161618" if dark else "#ffffff"
    assert count_color(picture, INF_COLOR) > 100, f"no inf is seen in {picture}"
    assert count_color(picture, background) > 100_000, f"the background is not {background} in {picture}"
    yellow = "#{:02x}{:02x}{:02x}".format(*shade(1.0))
    assert count_color(picture, yellow) > 100, f"no value is seen in {picture}"


def test_without_scripts_the_text_and_the_pictures_are_there(browser: Browser) -> None:
    document = re.sub(r"script-src 'sha256-[^']*'", "script-src 'none'", page(made_up()))
    seen = browser.dom(document)
    assert "data-ready" not in seen  # the policy holds
    assert re.search(r'<div id="map" hidden=""', seen)
    assert seen.count('src="data:image/png') == 2 and not re.search(r"<figure[^>]*hidden", seen)
    picture = browser.picture(document)
    assert count_color(picture, INF_COLOR) > 100, f"no inf is seen in {picture}"
