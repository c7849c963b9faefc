"""What the recipes are made from, by rule and from a seed: texts, pictures, and tokenizers learned from the texts."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WORDS = {
    "en": "the a of to and in is it you that was for on are with as his they be at one have this from by hot word but "
    "what some can out other were all there when up use how said each she which do their time if will way about many "
    "then them would write like so these her long make thing see him two has look more day could go come did my no",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus er "
    "hat dass sie nach wird bei einer um am sind noch wie einem über einen so zum war haben nur oder aber vor zur bis",
    "fr": "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se ce il sont mais comme "
    "avec tout nous sa leur ou été même aussi très où déjà être fait après deux élève garçon forêt naïf cœur",
    "ru": "и в не на я быть он с что а по это она этот к но они мы весь который из у то за свой от так о же для вот",
    "zh": "的 一 是 不 了 在 人 有 我 他 这 个 们 中 来 上 大 为 和 国 地 到 以 说 时 要 就 出 会 可",
}


def texts(n: int, languages: tuple[str, ...] = ("en",), seed: int = 0) -> Iterator[str]:
    """`n` distinct texts of a sentence up to some paragraphs, the languages in turns."""
    rng = random.Random(seed)
    for number in range(n):
        language = languages[number % len(languages)]
        words, space = WORDS[language].split(), "" if language == "zh" else " "
        sentences = []
        for _ in range(min(40, 1 + int(rng.expovariate(0.25)))):
            sentence = space.join(rng.choice(words) for _ in range(rng.randint(3, 18)))
            sentences.append(sentence[:1].upper() + sentence[1:] + ("。" if language == "zh" else "."))
        lines = [space.join(sentences[at : at + 5]) for at in range(0, len(sentences), 5)]
        yield "\n".join([f"{number}. {lines[0]}", *lines[1:]])


def picture(number: int, side: int = 32) -> Any:
    """A small picture that no other number has: stripes in two colours."""
    from PIL import Image, ImageDraw

    rng = random.Random(f"picture {number}")
    size = (side, rng.choice((side, side * 3 // 4, side // 2)))
    image = Image.new("RGB", size, tuple(rng.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for left in range(0, size[0], rng.randint(4, 12)):
        draw.rectangle((left, 0, left + 2, size[1]), fill=tuple(rng.randrange(256) for _ in range(3)))
    return image


def corpus(folder: Path) -> Path:
    """A text file in all languages, to learn a vocabulary from."""
    path = folder / "corpus.txt"
    path.write_text("\n".join(texts(600, tuple(WORDS), seed=7)) + "\n", encoding="utf-8")
    return path


def run(build: Callable[..., object], about: str) -> None:
    """The command of a recipe: `python tiny/NAME.py OUTPUT [--source SOURCE]`, where it takes a source."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="the new folder")
    if "source" in build.__annotations__:
        parser.add_argument("--source", help="take the real one: a folder or a hub id")
    options = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    report: Any = build(**options)
    print(report.text())
