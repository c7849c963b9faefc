"""tiny_tokenizer: the same tokenizer with fewer tokens, made by leaving tokens out and numbering the rest anew."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny._calls import NUMBER, PATH, checked_call
from mldebug.tiny._files import folder_beside, put, refuse
from mldebug.tiny._report import Check
from mldebug.tiny.tokenizer._checks import SAMPLE, check_tokenizer, sample_of
from mldebug.tiny.tokenizer._load import Loaded
from mldebug.tiny.tokenizer._plan import below_the_floor, droppable, make_plan, unused_tokens, write_folder
from mldebug.tiny.tokenizer._report import TinyTokenizerReport
from mldebug.tiny.tokenizer._side import write_json
from mldebug.tiny.tokenizer._source import Opened, open_source
from mldebug.tiny.tokenizer._train import follow, train_form
from mldebug.tiny.tokenizer._vocab import Vocabulary, choose

__all__ = ["TinyTokenizerReport", "shrink_tokenizer", "tiny_tokenizer"]

ID_MAP = "id_map.json"
DEFAULT_SIZE = 512  # where no size is asked for and the floor is lower


@checked_call(source=PATH, vocab_size=NUMBER, output=PATH, from_scratch=PATH)
def tiny_tokenizer(
    source: str | os.PathLike[str],
    vocab_size: int | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    from_scratch: str | os.PathLike[str] | None = None,
    drop_unused_added: bool = False,
    trust_remote_code: bool = False,
    offline: bool | None = None,
    force: bool = False,
) -> TinyTokenizerReport:
    """Write the tokenizer of `source` with `vocab_size` tokens to the new folder `output`, check it, and report.

    `source` is a folder, a file (tokenizer.json, vocab.json, vocab.txt, a SentencePiece or tiktoken file, tekken.json)
    or the id of a hub repository. Tokens are left out and the others numbered anew; normalizer, pre-tokenizer,
    post-processor, decoder, added tokens and chat templates stay. `id_map.json` beside the tokenizer maps old ids to
    new ones. A size below the floor, the number of tokens that must stay, is a UsageError that says what the floor is
    made of; `drop_unused_added` lets go of added tokens that no template, post-processor or config names.
    `from_scratch` names a text file to learn a vocabulary from, in place of keeping the best of the old one. `force`
    replaces an earlier tiny tokenizer.

        report = tiny_tokenizer("gpt2", 600, "gpt2-600")
        assert report.ok and report.size == 600
    """
    begin = time.perf_counter()
    if output is None:
        raise UsageError("no folder to write the tokenizer to", "give `output`, or -o DIR on the command line")
    target = Path(output)
    refuse(target, force, ID_MAP, "tiny tokenizer", source)
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(open_source(source, trust_remote_code=trust_remote_code, offline=offline))
        folder = stack.enter_context(folder_beside(target))
        text = None if from_scratch is None else Path(from_scratch)
        made = _shrink(opened, vocab_size, folder, drop_unused_added, text)
        write_json(folder / ID_MAP, {str(old): new for old, new in made.id_map.items()})
        checks = _checked(opened, made, folder, text)
        files = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
        put(folder, target, force)
    return TinyTokenizerReport(
        source=str(source),
        path=target,
        kind=made.vocabulary.kind,
        source_size=opened.loaded.size,
        size=made.size,
        floor=made.floor,
        floor_why=made.why,
        id_map=made.id_map,
        checks=checks,
        dropped=tuple(made.dropped),
        notes=(*opened.notes, *made.notes),
        seconds=time.perf_counter() - begin,
        files=files,
    )


def shrink_tokenizer(
    directory: str | os.PathLike[str],
    size: int | None,
    output: str | os.PathLike[str],
    *,
    drop_unused_added: bool = False,
    trust_remote_code: bool = False,
) -> dict[int, int]:
    """Write the tokenizer in `directory` with `size` tokens into the folder `output`, and return old id -> new id.

    None takes the floor or 512 tokens, whichever is more. The length of the new tokenizer is the length of the map.

        id_map = shrink_tokenizer("gpt2", 600, "gpt2-tiny")
    """
    target = Path(output)
    target.mkdir(parents=True, exist_ok=True)
    with open_source(directory, trust_remote_code=trust_remote_code, offline=True) as opened:
        return _shrink(opened, size, target, drop_unused_added).id_map


def _checked(opened: Opened, made: _Made, folder: Path, text: Path | None) -> tuple[Check, ...]:
    """The checks, with texts and unknown words that suit the vocabulary."""
    unknown, sample = made.vocabulary.unknown, list(SAMPLE)
    mapped: Callable[[int], int] | None = None
    if text is not None and "bytes" not in made.vocabulary.required:
        sample = [] if unknown is not None else sample_of(text)  # whole words of another text cannot be compared
        unknown = unknown or made.loaded.named.get("unk_token")  # stands for other characters than in the source
        sample = [line for line in sample if _knows(opened.loaded, line, unknown)]
    elif unknown is not None:
        mapped = partial(_mapped, made.id_map, made.loaded.ids[unknown])
    return check_tokenizer(opened.loaded, made.loaded, folder, opened.load, sample, mapped, unknown)


def _knows(loaded: Loaded, line: str, unknown: str | None) -> bool:
    """Whether nothing in the line is unknown: what is cannot be compared with a vocabulary that knows it."""
    try:
        return unknown is None or loaded.ids.get(unknown) not in loaded.encode(line)
    except Exception:  # a tokenizer raises what it likes; the check answers it
        return True


def _mapped(id_map: Mapping[int, int], unknown: int, id: int) -> int:
    return id_map.get(id, unknown)


@dataclass
class _Made:
    loaded: Loaded
    vocabulary: Vocabulary
    floor: int
    why: str
    size: int
    id_map: dict[int, int]
    dropped: tuple[str, ...]
    notes: list[str]


def _shrink(opened: Opened, size: int | None, output: Path, drop: bool, text: Path | None = None) -> _Made:
    """Choose, write, load what was written, and adjust where loading adds or takes tokens."""
    leading, *others = opened.forms
    unused = unused_tokens(opened) if drop else []
    plan = make_plan(opened, leading, droppable(opened, unused), alphabet=text is None)
    wanted = max(plan.floor, DEFAULT_SIZE) if size is None else size
    if wanted < plan.floor:
        raise below_the_floor(opened, plan, wanted, drop)
    why, floor, notes = plan.why, plan.floor, list[str]()
    if text is not None:
        leading = train_form(leading, plan.vocabulary, text, wanted - len(plan.on_load))
        others, left = follow(leading, others)
        notes = [f"{name} is left out: it has the vocabulary of the source" for name in left]
        vocabulary = leading.vocabulary([*plan.vocabulary.must_stay()], plan.dropped)
        plan = replace(plan, vocabulary=vocabulary)
    if size is not None and size > plan.total:
        what = "the source has" if text is None else f"{text} gives"
        notes.append(f"{what} {plan.total:,} tokens, so the result has no more")
    wanted = min(wanted, plan.total)
    room = wanted - len(plan.on_load)
    for _attempt in range(3):
        kept = choose(plan.vocabulary, room)
        write_folder(opened, leading, others, kept, plan, output)
        loaded = opened.load(output)
        room -= loaded.size - wanted
        if loaded.size == wanted or room < plan.vocabulary.floor:
            break
    if loaded.size != wanted:
        raise MldebugError(
            f"the tokenizer was written with {wanted:,} tokens and loads with {loaded.size:,}",
            _came_back(loaded, kept, plan.on_load),
        )
    old, new = opened.loaded.ids, loaded.ids
    id_map = {old[token]: id for token, id in new.items() if token in old}
    return _Made(loaded, plan.vocabulary, floor, why, loaded.size, dict(sorted(id_map.items())), plan.dropped, notes)


def _came_back(loaded: Loaded, kept: Collection[str], on_load: Collection[str]) -> str:
    meant = {*kept, *on_load}
    back = [token for token in loaded.ids if token not in meant]
    shown = ", ".join(back[:5]) or "none"
    return f"tokens that the class of the tokenizer puts back: {shown}; keep them, or set tokenizer_class"
