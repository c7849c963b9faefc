"""What stays and what may go of a tokenizer: its floor, and the folder that is written with fewer tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from mldebug.core.errors import UsageError
from mldebug.tiny.tokenizer._checks import reloaded
from mldebug.tiny.tokenizer._forms import Form
from mldebug.tiny.tokenizer._side import (
    CONFIG,
    ids_in_configs,
    listed_specials,
    mentioned,
    named_specials,
    read_object,
    write_side_files,
)
from mldebug.tiny.tokenizer._source import Opened
from mldebug.tiny.tokenizer._vocab import Vocabulary, choose


@dataclass(frozen=True)
class Plan:
    """What is chosen from: the vocabulary of the leading form, and the tokens that loading adds to it."""

    vocabulary: Vocabulary
    on_load: tuple[str, ...]
    dropped: tuple[str, ...]

    @property
    def floor(self) -> int:
        return self.vocabulary.floor + len(self.on_load)

    @property
    def total(self) -> int:
        """As many tokens as there are."""
        return len(self.vocabulary.ids) + len(self.on_load)

    @property
    def why(self) -> str:
        """The floor in words."""
        return self.vocabulary.why() + (f", {len(self.on_load):,} that loading adds" if self.on_load else "")


def make_plan(opened: Opened, leading: Form, dropped: Collection[str], alphabet: bool = True) -> Plan:
    """The plan without the added tokens of `dropped`. Without `alphabet` characters need not stay."""
    gone = set(dropped)
    vocabulary = leading.vocabulary([token for token in _specials(opened) if token not in gone], gone)
    if not alphabet:
        vocabulary.required.pop("characters", None)
    known = leading.ids()
    on_load = tuple(token for token in opened.loaded.ids if token not in known and token not in gone)
    return Plan(vocabulary, on_load, tuple(dropped))


def _specials(opened: Opened) -> list[str]:
    """Every token that has a role: named, listed, found in the text as it stands, or named by id in a config."""
    leading, names = opened.forms[0], opened.loaded.names
    tokens = [
        *named_specials(opened.directory).values(),
        *listed_specials(opened.directory),
        *opened.loaded.named.values(),
        *leading.named().values(),
        *opened.loaded.added,
        *leading.added(),
        *(names[id] for id in sorted(ids_in_configs(opened.directory)) if id in names),
    ]
    known = leading.ids()
    return [token for token in dict.fromkeys(tokens) if token in opened.loaded.ids or token in known]


def unused_tokens(opened: Opened) -> list[str]:
    """Added tokens that nothing names: no role, template, post-processor, config."""
    leading = opened.forms[0]
    own = set(leading.added())
    added = dict.fromkeys([*leading.added(), *listed_specials(opened.directory), *opened.loaded.added])
    bare = leading.vocabulary([], [])
    used = {*opened.loaded.named.values(), *named_specials(opened.directory).values(), *leading.used()}
    used |= {opened.loaded.names.get(id, "") for id in ids_in_configs(opened.directory)}
    used |= mentioned(opened.directory, added, list(opened.loaded.templates.values()))
    used |= bare.must_stay() - own
    used |= set(bare.required.get("special tokens", []))
    return [token for token in added if token not in used]


def droppable(opened: Opened, unused: list[str]) -> list[str]:
    """Those of `unused` that stay away: a class may put tokens of its own back. Tried, at the smallest size."""
    leading, *others = opened.forms
    while unused:
        plan = make_plan(opened, leading, unused)
        with tempfile.TemporaryDirectory(prefix="mldebug-") as name:
            folder = Path(name)
            write_folder(opened, leading, others, choose(plan.vocabulary, plan.vocabulary.floor), plan, folder)
            again = reloaded(opened.load(folder), folder, opened.load)
        back = again.ids.keys() & set(unused)
        if not back:
            break
        unused = [token for token in unused if token not in back]
    return unused


def below_the_floor(opened: Opened, plan: Plan, wanted: int, drop: bool) -> UsageError:
    """The refusal: what the floor is made of, and what could be let go of."""
    hint = f"ask for {plan.floor:,} or more"
    unused = [] if drop else droppable(opened, unused_tokens(opened))
    if unused:
        without = make_plan(opened, opened.forms[0], unused, alphabet="characters" in plan.vocabulary.required)
        shown = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
        hint += (
            f"; --drop-unused-added would remove {len(unused):,} added tokens that nothing names ({shown}) and bring "
            f"the floor to {without.floor:,}"
        )
    characters = len(plan.vocabulary.required.get("characters", []))
    if characters > plan.floor / 2:
        hint += "; --from-scratch FILE takes only the characters of a text"
    return UsageError(
        f"a vocabulary of {wanted:,} is below the floor of {opened.name}, {plan.floor:,} tokens: {plan.why}", hint
    )


def write_folder(
    opened: Opened,
    leading: Form,
    others: Collection[Form],
    kept: list[str],
    plan: Plan,
    output: Path,
) -> None:
    """Write every form and the files around them with the tokens of `kept`."""
    dropped = set(plan.dropped)
    ids = leading.write(kept, output, None)
    for token in sorted(plan.on_load, key=opened.loaded.ids.__getitem__):
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
