"""What must hold between a tokenizer and its tiny version."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from mldebug.tiny._report import Check
from mldebug.tiny.tokenizer._load import Loaded, quiet

T = TypeVar("T")
REFUSED = "raises "

SAMPLE = (
    "The quick brown fox jumps over the lazy dog, and doesn't look back.",
    "  two spaces before, a\ttab,\n\na blank line and three spaces behind   ",
    "def f(x):\n    return {'a': [1, 2.5e-3], \"b\": x ** 2 != 7}  # 100%",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Voix ambiguë d'un cœur qui, au zéphyr, préfère les jattes de kiwis.",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia: ¿dónde está, señor?",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "نص حكيم له سر قاطع وذو شأن عظيم.",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה.",
    "ऋषियों को सताने वाले दुष्ट राक्षसों का राजा रावण।",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "天地玄黄,宇宙洪荒。日月盈昃,辰宿列张。",
    "いろはにほへと ちりぬるを ワカヨタレソ 常ならむ",
    "키스의 고유조건은 입술끼리 만나야 하고",
    "Đây là một câu tiếng Việt; İstanbul'da çiğ köfte yedim.",
    "emoji 👩‍👩‍👧‍👦 🇪🇺 👍🏽 and signs ∑∞≠ ½ ™ “quotes” – dash…",
    "0123456789 3.14159 1,000,000 2024-02-29",
    "",
)
TALKS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello, who are you?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4."},
        {"role": "user", "content": "Und auf Deutsch?"},
    ],
)


def check_tokenizer(
    source: Loaded,
    tiny: Loaded,
    folder: Path,
    load: Callable[[Path], Loaded],
    sample: Sequence[str] = SAMPLE,
    mapped: Callable[[int], int] | None = None,
    unknown: str | None = None,
) -> tuple[Check, ...]:
    """Every check of `tiny`, which is in `folder`, against its source.

    `mapped` gives the new id of an old one where a vocabulary has whole words only, so that those which went are
    unknown: then every other word must be what it was. `unknown` is the token for those.
    """

    def round_trip() -> Check:
        return _round_trip(source, tiny, sample) if mapped is None else _same_words(source, tiny, sample, mapped)

    return (
        _guarded("round trip", round_trip),
        _guarded("special tokens", lambda: _special_tokens(source, tiny, sample, unknown)),
        _guarded("chat template", lambda: _chat_template(source, tiny, unknown)),
        _guarded("ids", lambda: _ids(tiny)),
        _guarded("reload", lambda: _reload(source, tiny, folder, load)),
    )


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """The check; an exception out of the tokenizer is a check that failed."""
    try:
        with quiet():
            return check()
    except BaseException as exc:  # a tokenizer raises what it likes; a panic of its core is no Exception
        _unless_stopped(exc)
        return Check(name, False, f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0][:200]}")


def _unless_stopped(exc: BaseException) -> None:
    """What stops the program goes on its way."""
    if isinstance(exc, (KeyboardInterrupt, SystemExit)):
        raise exc


def sample_of(text: Path, lines: int = 20) -> list[str]:
    """Lines spread over a text, for a vocabulary that was learnt from it."""
    found = [line for line in text.read_text(encoding="utf-8").splitlines() if line.strip()]
    return found[:: max(len(found) // lines, 1)][:lines]


def _round_trip(source: Loaded, tiny: Loaded, sample: Sequence[str]) -> Check:
    if not sample:
        return Check("round trip", None, "the source knows none of the text: there is nothing to compare")
    wrong = []
    exact, refused = 0, list[str]()
    for text in sample:
        want, got = _tried(_there_and_back, source, text), _tried(_there_and_back, tiny, text)
        refused += [want] if want.startswith(REFUSED) else []
        exact += not got.startswith(REFUSED) and text in got
        if want != got and not (text and text in got):
            wrong.append(f"{text[:20]!r} decodes to {_differs(want, got)}")
    if wrong:
        return Check("round trip", False, f"{len(wrong)} of {len(sample)} texts differ: {wrong[0]}")
    if len(refused) >= sum(bool(text) for text in sample):
        return Check("round trip", False, f"the source encodes no text at all: it {refused[0]}")
    why = f"{len(sample)} texts decode as the source decodes them, {exact} of them exactly"
    return Check("round trip", True, why + (f"; {len(refused)} are refused by both" if refused else ""))


def _same_words(source: Loaded, tiny: Loaded, sample: Sequence[str], mapped: Callable[[int], int]) -> Check:
    known = [[mapped(id) for id in source.encode(text)] for text in sample]
    wrong = [text for text, ids in zip(sample, known, strict=True) if tiny.encode(text) != ids]
    if wrong:
        return Check("round trip", False, f"{len(wrong)} of {len(sample)} texts differ: {wrong[0][:20]!r}")
    return Check("round trip", True, f"{len(sample)} texts: words that were kept stay, others are unknown")


def _there_and_back(loaded: Loaded, text: str) -> str:
    return loaded.decode(loaded.encode(text))


def _tried(what: Callable[[Loaded, str], T], loaded: Loaded, text: str) -> T | str:
    """What comes out, or the error in words: a tokenizer may refuse a text, and its tiny version must as well."""
    try:
        return what(loaded, text)
    except BaseException as exc:  # a tokenizer raises what it likes
        _unless_stopped(exc)
        return f"{REFUSED}{type(exc).__name__}: {(str(exc).splitlines() or [''])[0][:200]}"


def _encoded(loaded: Loaded, text: str) -> list[int]:
    return loaded.encode(text)


def _differs(want: str, got: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))
    return f"{got[max(at - 5, 0) : at + 10]!r} and not {want[max(at - 5, 0) : at + 10]!r}"


def _special_tokens(source: Loaded, tiny: Loaded, sample: Sequence[str], unknown: str | None) -> Check:
    """Each added token is found where the source finds it; what is inserted and what decoding skips is the same."""
    name = "special tokens"
    kept = {token: id for token, id in source.added.items() if token in tiny.ids and token != unknown}
    if source.named != tiny.named:
        return Check(name, False, f"the roles are {tiny.named} and not {source.named}")
    lost = [token for token in kept if token not in tiny.added]
    if lost:
        return Check(name, False, f"no longer special: {', '.join(lost[:5])}")

    def marks(loaded: Loaded, text: str) -> list[str]:
        return _specials_in(loaded, loaded.encode(text), kept)

    for token in kept:
        for text in (token, f"ab {token} cd", f"ab{token}cd"):
            want, got = _tried(marks, source, text), _tried(marks, tiny, text)
            if want != got:
                return Check(name, False, f"{text!r} has {got} and not {want}")
    for text in sample[:4] if unknown is None else ("",):  # more words are unknown now, and skipped as such
        if why := _inserted_differ(source, tiny, text, kept):
            return Check(name, False, why)
    roles = f"{len(source.named)} roles" if source.named else "no roles"
    return Check(name, True, f"{len(kept):,} are found, inserted and skipped as in the source; {roles}")


def _inserted_differ(source: Loaded, tiny: Loaded, text: str, kept: Collection[str]) -> str | None:
    """Why what is put around a text, or left out in decoding, differs; None where it does not."""

    def around_two(loaded: Loaded, text: str) -> tuple[list[str], list[int]]:
        ids, kinds = loaded.pair(text, "pair") if loaded.pair is not None else ([], [])
        return _specials_in(loaded, ids, kept), list(dict.fromkeys(kinds))

    def skipped(loaded: Loaded, text: str) -> str:
        return loaded.skipping(loaded.encode(text)) if loaded.skipping is not None else ""

    want, got = _tried(around_two, source, text), _tried(around_two, tiny, text)
    if want != got:
        return f"a pair has the special tokens and type ids {got} and not {want}"
    want_text, got_text = _tried(skipped, source, text), _tried(skipped, tiny, text)
    if want_text != got_text:
        return f"without special tokens {text[:20]!r} decodes to {_differs(want_text, got_text)}"
    return None


def _specials_in(loaded: Loaded, ids: Sequence[int], tokens: Collection[str]) -> list[str]:
    """The tokens of `tokens` among the ids, in their order."""
    found = (loaded.names.get(id, "") for id in ids)
    return [token for token in found if token in tokens]


def _chat_template(source: Loaded, tiny: Loaded, unknown: str | None) -> Check:
    name = "chat template"
    if dict(source.templates) != dict(tiny.templates):
        return Check(name, False, f"the templates are {sorted(tiny.templates)}, not {sorted(source.templates)}")
    if source.chat is None or tiny.chat is None:
        return Check(name, None, "the source has none")
    rendered = 0
    for template in source.templates:
        for talk in TALKS:
            want, got = _said(source, template, talk, unknown), _said(tiny, template, talk, unknown)
            if want != got:
                return Check(name, False, f"template {template!r} gives {got} and not {want}")
            rendered += isinstance(want, tuple)
    return Check(name, True, f"same text and same special tokens in {rendered} conversations")


def _said(
    loaded: Loaded, template: str, talk: list[dict[str, str]], unknown: str | None
) -> tuple[str, list[str]] | str:
    """The text with its special tokens, or the error with which the template refuses the conversation.

    Words that are `unknown` may be others than in the source, where a vocabulary has other words.
    """
    assert loaded.chat is not None
    try:
        text, ids = loaded.chat(template, talk)
    except BaseException as exc:  # a template raises what it likes, and must do so here as in the source
        _unless_stopped(exc)
        return f"{type(exc).__name__}: {exc}"
    return text, _specials_in(loaded, ids, loaded.added.keys() - {unknown})


def _ids(tiny: Loaded) -> Check:
    holes = sorted(set(range(tiny.size)) ^ set(tiny.ids.values()))
    if holes:
        return Check("ids", False, f"{len(holes)} ids are missing or too high: {holes[:5]}")
    encoded = [_tried(_encoded, tiny, text) for text in (*SAMPLE, *list(tiny.added)[:2000])]
    most = max((id for ids in encoded if not isinstance(ids, str) for id in ids), default=0)
    if most >= tiny.size:
        return Check("ids", False, f"encoding gives id {most}, and there are {tiny.size:,} tokens")
    return Check("ids", True, f"0 to {tiny.size - 1:,} without a hole; encoding gives no others")


def _reload(source: Loaded, tiny: Loaded, folder: Path, load: Callable[[Path], Loaded]) -> Check:
    """What the library saves and loads again has the same length and the same ids, and encodes as before."""
    loaded = reloaded(tiny, folder, load)
    if loaded.ids != tiny.ids:
        extra = [token for token in loaded.ids if token not in tiny.ids][:5]
        return Check("reload", False, f"{loaded.size:,} tokens after reload, with {extra or 'other ids'}")
    what = "saved and loaded again" if callable(getattr(tiny.object, "save_pretrained", None)) else "loaded again"
    why = f"{what}: {loaded.size:,} tokens, same ids"
    wrong = [text for text in SAMPLE if _tried(_encoded, loaded, text) != _tried(_encoded, tiny, text)]
    if wrong:
        again = reloaded(source, folder, load) if what.startswith("saved") else source
        if all(_tried(_encoded, again, text) == _tried(_encoded, source, text) for text in wrong):
            return Check("reload", False, f"{wrong[0][:20]!r} is encoded otherwise after reload")
        why += f"; its class encodes {wrong[0][:20]!r} otherwise after reload, the source's too"
    return Check("reload", True, why)


def reloaded(tokenizer: Loaded, folder: Path, load: Callable[[Path], Loaded]) -> Loaded:
    """The tokenizer saved by its library and loaded again; loaded once more where the library does not save."""
    save = getattr(tokenizer.object, "save_pretrained", None)
    if not callable(save):
        return load(folder)
    with tempfile.TemporaryDirectory(prefix="mldebug-") as name:
        save(name)
        return load(Path(name))
