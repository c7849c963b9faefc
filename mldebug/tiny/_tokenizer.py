"""tiny_tokenizer: the same tokenizer with fewer tokens, made by leaving tokens out and numbering the rest anew."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from mldebug.core.errors import MldebugError, UsageError
from mldebug.tiny._tokenizer_checks import SAMPLE, check_tokenizer, reloaded, sample_of
from mldebug.tiny._tokenizer_forms import Form
from mldebug.tiny._tokenizer_load import Loaded
from mldebug.tiny._tokenizer_report import TinyTokenizerReport, TokenizerCheck
from mldebug.tiny._tokenizer_side import (
    CONFIG,
    ids_in_configs,
    listed_specials,
    mentioned,
    named_specials,
    read_object,
    write_json,
    write_side_files,
)
from mldebug.tiny._tokenizer_source import Opened, open_source
from mldebug.tiny._tokenizer_train import follow, train_form
from mldebug.tiny._tokenizer_vocab import Vocabulary, choose

__all__ = ["TinyTokenizerReport", "TokenizerCheck", "shrink_tokenizer", "tiny_tokenizer"]

ID_MAP = "id_map.json"
DEFAULT_SIZE = 512  # where no size is asked for and the floor is lower


def tiny_tokenizer(
    source: str | os.PathLike[str],
    vocab_size: int | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    from_scratch: str | os.PathLike[str] | None = None,
    drop_unused_added: bool = False,
    trust_remote_code: bool = False,
    offline: bool | None = None,
) -> TinyTokenizerReport:
    """Write the tokenizer of `source` with `vocab_size` tokens to the new folder `output`, check it, and report.

    `source` is a folder, a file (tokenizer.json, vocab.json, vocab.txt, a SentencePiece or tiktoken file, tekken.json)
    or the id of a hub repository. Tokens are left out and the others numbered anew; normalizer, pre-tokenizer,
    post-processor, decoder, added tokens and chat templates stay. `id_map.json` beside the tokenizer maps old ids to
    new ones. A size below the floor, the number of tokens that must stay, is a UsageError that says what the floor is
    made of; `drop_unused_added` lets go of added tokens that no template, post-processor or config names.
    `from_scratch` names a text file to learn a vocabulary from, in place of keeping the best of the old one.

        report = tiny_tokenizer("gpt2", 600, "gpt2-600")
        assert report.ok and report.size == 600
    """
    begin = time.perf_counter()
    if output is None:
        raise UsageError("no folder to write the tokenizer to", "give `output`, or -o DIR on the command line")
    target = Path(output)
    _refuse_existing(target)
    with open_source(source, trust_remote_code=trust_remote_code, offline=offline) as opened, _beside(target) as folder:
        text = None if from_scratch is None else Path(from_scratch)
        made = _shrink(opened, vocab_size, folder, drop_unused_added, text)
        write_json(folder / ID_MAP, {str(old): new for old, new in made.id_map.items()})
        sample = SAMPLE if text is None or made.has_bytes else sample_of(text)
        unknown = made.loaded.ids.get(made.vocabulary.unknown or "")
        mapped = None if unknown is None else lambda id: made.id_map.get(id, unknown)
        checks = check_tokenizer(opened.loaded, made.loaded, folder, opened.load, sample, mapped)
        files = tuple(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()))
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


@dataclass
class _Made:
    loaded: Loaded
    vocabulary: Vocabulary
    floor: int
    why: str
    size: int
    id_map: dict[int, int]
    dropped: list[str]
    notes: list[str]

    @property
    def has_bytes(self) -> bool:
        return "bytes" in self.vocabulary.required


def _shrink(opened: Opened, size: int | None, output: Path, drop: bool, text: Path | None = None) -> _Made:
    """Choose, write, load what was written, and adjust where loading adds or takes tokens."""
    leading, *others = opened.forms
    specials = _specials(opened, leading)
    unused = _unused(opened, leading)
    dropped = _droppable(opened, unused, specials) if drop else []
    vocabulary = leading.vocabulary([token for token in specials if token not in dropped], dropped)
    known = leading.ids()
    on_load = [token for token in opened.loaded.ids if token not in known and token not in dropped]
    if text is not None:  # the characters will be those of the text
        vocabulary.required.pop("characters", None)
    floor = vocabulary.floor + len(on_load)
    why = vocabulary.why() + (f", {len(on_load)} that loading adds" if on_load else "")
    wanted = max(floor, DEFAULT_SIZE) if size is None else size
    if wanted < floor:
        raise _below(opened, leading, wanted, floor, why, specials, unused, drop)
    notes = []
    if text is not None:
        leading = train_form(leading, vocabulary, text, wanted - len(on_load))
        vocabulary = leading.vocabulary([token for token in specials if token not in dropped], dropped)
        others, left = follow(leading, others)
        notes = [f"{name} is left out: it has the vocabulary of the source" for name in left]
    total = len(vocabulary.ids) + len(on_load)
    if size is not None and size > total:
        what = "the source has" if text is None else f"{text} gives"
        notes.append(f"{what} {total:,} tokens, so the result has no more")
    wanted = min(wanted, total)
    room = wanted - len(on_load)
    for _attempt in range(3):
        kept = choose(vocabulary, room)
        _write(opened, leading, others, kept, on_load, dropped, output)
        loaded = opened.load(output)
        if loaded.size == wanted:
            break
        room -= loaded.size - wanted
        if room < vocabulary.floor:
            break
    if loaded.size != wanted:
        raise MldebugError(
            f"the tokenizer was written with {wanted:,} tokens and loads with {loaded.size:,}",
            _came_back(loaded, kept, on_load),
        )
    old, new = opened.loaded.ids, loaded.ids
    id_map = {old[token]: new[token] for token in sorted(new, key=new.__getitem__) if token in old}
    return _Made(loaded, vocabulary, floor, why, loaded.size, dict(sorted(id_map.items())), dropped, notes)


def _write(
    opened: Opened,
    leading: Form,
    others: Collection[Form],
    kept: list[str],
    on_load: list[str],
    dropped: Collection[str],
    output: Path,
) -> None:
    ids = leading.write(kept, output, None)
    for token in sorted(on_load, key=opened.loaded.ids.__getitem__):
        ids.setdefault(token, len(ids))
    for form in others:
        own = form.ids()
        if form.path.name == "vocab-tgt.json":  # the other language has its own numbers
            form.write(choose(form.vocabulary([], dropped), len(kept)), output, None)
        else:
            form.write([token for token in kept if token in own], output, ids)
    changes: dict[str, object] = {}
    if any(token.startswith("<extra_id_") for token in dropped):  # T5 and its kin make them anew by their number
        changes["extra_ids"] = sum(token.startswith("<extra_id_") for token in ids)
    written = read_object(opened.directory / CONFIG).get("tokenizer_class")
    if opened.tokenizer_class and (written or "").removesuffix("Fast") != opened.tokenizer_class:
        changes["tokenizer_class"] = opened.tokenizer_class
    write_side_files(opened.directory, output, ids, opened.loaded.ids, dropped, changes)


def _specials(opened: Opened, leading: Form) -> list[str]:
    """Every token that has a role: named, listed, found in the text as it stands, or named by id in a config."""
    by_id = {id: token for token, id in opened.loaded.ids.items()}
    tokens = [
        *named_specials(opened.directory).values(),
        *listed_specials(opened.directory),
        *opened.loaded.named.values(),
        *leading.named().values(),
        *opened.loaded.added,
        *leading.added(),
        *(by_id[id] for id in sorted(ids_in_configs(opened.directory)) if id in by_id),
    ]
    known = leading.ids()
    return [token for token in dict.fromkeys(tokens) if token in opened.loaded.ids or token in known]


def _unused(opened: Opened, leading: Form) -> list[str]:
    """Added tokens that nothing names: no role, template, post-processor, config."""
    added = dict.fromkeys([*leading.added(), *listed_specials(opened.directory), *opened.loaded.added])
    by_id = {id: token for token, id in opened.loaded.ids.items()}
    used = {*opened.loaded.named.values(), *named_specials(opened.directory).values(), *leading.used()}
    used |= {by_id.get(id, "") for id in ids_in_configs(opened.directory)}
    used |= mentioned(opened.directory, added, list(opened.loaded.templates.values()))
    used |= leading.vocabulary([], []).must_stay() - set(leading.added())
    used |= set(leading.vocabulary([], []).required.get("special tokens", []))
    return [token for token in added if token not in used]


def _droppable(opened: Opened, unused: list[str], specials: list[str]) -> list[str]:
    """Those of `unused` that stay away: a class may put tokens of its own back. Tried, at the smallest size."""
    leading, *others = opened.forms
    while unused:
        vocabulary = leading.vocabulary([token for token in specials if token not in unused], unused)
        known = leading.ids()
        on_load = [token for token in opened.loaded.ids if token not in known and token not in unused]
        with tempfile.TemporaryDirectory(prefix="mldebug-") as name:
            folder = Path(name)
            _write(opened, leading, others, choose(vocabulary, vocabulary.floor), on_load, unused, folder)
            again = reloaded(opened.load(folder), folder, opened.load)
        back = again.ids.keys() & set(unused)
        if not back:
            break
        unused = [token for token in unused if token not in back]
    return unused


def _below(
    opened: Opened,
    leading: Form,
    wanted: int,
    floor: int,
    why: str,
    specials: list[str],
    unused: list[str],
    drop: bool,
) -> UsageError:
    hint = f"ask for {floor:,} or more"
    unused = [] if drop else _droppable(opened, unused, specials)
    if unused:
        without = leading.vocabulary([token for token in specials if token not in unused], unused)
        known = leading.ids()
        rest = [token for token in opened.loaded.ids if token not in known and token not in unused]
        shown = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
        hint += (
            f"; --drop-unused-added would remove {len(unused):,} added tokens that nothing names ({shown}) and bring "
            f"the floor to {without.floor + len(rest):,}"
        )
    return UsageError(f"a vocabulary of {wanted:,} is below the floor of {opened.name}, {floor:,} tokens: {why}", hint)


def _came_back(loaded: Loaded, kept: Collection[str], on_load: Collection[str]) -> str:
    back = [token for token in loaded.ids if token not in {*kept, *on_load}]
    shown = ", ".join(back[:5]) or "none"
    return f"tokens that the class of the tokenizer puts back: {shown}; keep them, or set tokenizer_class"


def _refuse_existing(target: Path) -> None:
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target} is there already", "choose a new folder: nothing is ever overwritten")


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place when all went well, and goes when not."""
    parent = target.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=parent))
    except OSError as exc:
        raise UsageError(f"cannot write {target}: {(exc.strerror or str(exc)).lower()}", "choose another -o") from exc
    try:
        yield folder
        folder.chmod(0o755)
        if target.is_dir():
            target.rmdir()
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
