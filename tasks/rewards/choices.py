r"""Find which letter of a multiple-choice question a text gives as the answer.

| the text says | letter |
|---|---|
| `the answer is C`, `Answer: (C)`, `option C is correct` | C: the last of these sentences takes precedence over all |
| `the answer is A or B`, `the answer is either A or B` | none, and nothing before it counts |
| `C is correct, but so is D` | none, and nothing before it counts |
| `The answer is C, I mean B`, `The answer is C. That is wrong. It is B.` | none: another letter takes it back |
| `the answer is not B`, `(B) is wrong` | not B, even if the text says B elsewhere |
| `Not A, so C`, `I choose C`, `**C**`, `C. water` | C, where no sentence is of these |
| `A and B fail`, `Let A be a set` | none |
"""

import re
from collections.abc import Collection, Iterator

_LONGEST, _MOST = 500, 200
"""Maximum of characters of a sentence, and of sentences, that are read."""
_WRAPPED = re.compile(
    r"\\(?:boxed|fbox|text\w*|math\w+)\s{0,9}\{|[*_${}\"“”‘`]|(?<![A-Za-z])['’]|['’](?![A-Za-z])|\\[,;! ]"
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n")
_ARTICLE = r"(?<=[AI]) (?!(?:is|or|and|nor|with|as|because|since)\b)[a-z]"
_LETTER = rf"(?:\(([A-Z])\)|(?<![\w'’-])([A-Z])(?![\w'’]|-\w|{_ARTICLE}))"
_MENTIONED = re.compile(_LETTER)
_STATED = re.compile(
    r"(.*)\b(?:answer|option|choice)s?\b[^:]*?(?:\bis\b|\b(?:must|should|has to|would) be\b|:)(.*)", re.IGNORECASE
)
_CORRECT = re.compile(r"(.*?)\b(?:is|must be|would be)(?: \w+ly)?(?: the)? (?:correct|right|best)\b(.*)", re.IGNORECASE)
_ALSO = re.compile(r"\b(?:(?:so|as) (?:is|are)|or|as well|also|too)\b", re.IGNORECASE)
_CORRECTION = (
    r"\b(?:wait|correction|sorry|oops|scratch that|on second thought|i meant?|"
    r"that(?:['’]s| is) (?:wrong|incorrect|not (?:it|right|correct)))\b|(?:^|\W{2})no,"
)
_CORRECTED = re.compile(_CORRECTION, re.IGNORECASE)
_RETRACTED = re.compile(rf"{_CORRECTION}|\b(?:actually|mistake\w*|mistaken|rather|instead)\b", re.IGNORECASE)
_BEFORE = r"(?:\W|\b(?:{words})\b)*?"
_HEAD = re.compile(
    rf"(?i:{_BEFORE.format(words='the|clearly|definitely|indeed|therefore|thus|option|choice|letter|answer|again')})"
    rf"{_LETTER}(.*)"
)
_ALONE = re.compile(
    "(?i:"
    + _BEFORE.format(
        words="i|it|is|must|be|choose|pick|mean|say|select|would|go|with|going|option|choice|final|answer|my|we|get"
    )
    + rf"){_LETTER}\W*"
)
_SMALL = re.compile(r"\W*(?:option |choice )?([a-z])\W*")
_JOINED = re.compile(rf"\W*(?:or|and|nor|/|&|but)?\W*{_LETTER}")
_DENIED = re.compile(
    r"\b(?:not|never|no|neither|nor|none|cannot|wrong|incorrect|false|untrue|unless|if|except|eliminate\w*|exclude\w*)\b"
    r"|n['’]t\b",
    re.IGNORECASE,
)
_DENIED_NEXT = re.compile(
    rf"(?:{_DENIED.pattern})(?:\W|\b(?:\w+ly|the|an?|that|it|is|be|been|answer|option|choice|letter|even|longer|choose|"
    r"pick|select|say|think|believe|mean|go|with)\b)*",
    re.IGNORECASE,
)
_BEFORE_STATED = re.compile(
    r"(?:\W|\b(?:the|correct|right|best|final|my|our|this|that|it|which|means|gives|and|i|we|think|believe|conclude|see|"
    r"finally|overall|clearly|clear|is|in|conclusion|single|only|to|question|now)\b)*",
    re.IGNORECASE,
)
_BEHIND_LETTER = re.compile(r"\W*|\s*[:).,;(–-].*|\s+(?:because|since|as|with|for|where|due)\b.*")
_CLAUSE = re.compile(r"[,:]|\b(?:so|(?<!ll )(?<!ng )(?<!ne )but|thus|hence|therefore|then|rather)\b", re.IGNORECASE)


def letter_of(text: str, letters: Collection[str], loose: bool = True) -> str | None:
    """Return the letter, one of `letters`; empty where the text names several or denies it, None where it names none.

    Args:
        loose: accept a letter also without a sentence that says that it is the answer.
    """
    denied: set[str] = set()
    instead: set[str] = set()
    alone: str | None = None
    corrected = False
    for sentence in _sentences(text):
        stated = _stated(sentence, letters)
        if stated is not None:
            instead |= {alone} if corrected and alone else set()
            return "" if stated in denied or instead - {stated} else stated
        named = _named(sentence, letters)
        if named and alone is None:
            alone = _alone(sentence, letters)
            named -= {alone}
        corrected = corrected or _CORRECTED.search(sentence) is not None
        if _DENIED.search(sentence):
            denied |= named
        elif _RETRACTED.search(sentence):
            instead |= _named(sentence, letters)
    return None if not loose or alone is None else "" if alone in denied else alone


def choice_in_box(box: str, letters: Collection[str], texts: Collection[str]) -> str | None:
    r"""Return the letter in a box, alone, as in `\textbf{C}`, or before the text of its choice, as in `C. water`.

    None where the box contains anything else. `texts` are the texts of the choices, in the order of their letters, if
    known.
    """
    match = re.fullmatch(
        r"\(?\s*([A-Z])\s*(?:\)?\s*\.?|(?:\)\s?[.:]?|[.:,])\s*(\w.*))", _WRAPPED.sub("", box[:_LONGEST]).strip()
    )
    if match is None or match[1] not in letters:
        return None
    rest = match[2] or ""
    if texts and rest:
        text = dict(zip(letters, texts, strict=False)).get(match[1], "")
        return match[1] if plain(text) == plain(rest) else None
    joined = re.match(r"(?:or|and)\b", rest) or _named(rest, letters)
    return None if joined or denies(rest) else match[1]


def denies_what_follows(text: str) -> bool:
    """Whether a text ends with a word that denies what follows it, such as `It is not` before a box.

    A word that denies something else does not count, as in `The one that is not a metal is`.
    """
    return _denies_next(_WRAPPED.sub("", _CLAUSE.split(_SENTENCE.split(text[-_LONGEST:])[-1])[-1]))


def _denies_next(clause: str) -> bool:
    return any(_DENIED_NEXT.fullmatch(clause, match.start()) for match in _DENIED.finditer(clause))


def denies(text: str) -> bool:
    """Whether a text contains a negation."""
    return _DENIED.search(text) is not None


def plain(text: str) -> str:
    """Return the words and numbers of a text, in lower case."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def _sentences(text: str) -> Iterator[str]:
    """Yield sentences from the last one backwards, without markup, and without questions."""
    for sentence in _SENTENCE.split(re.sub(r":\s{1,9}", ": ", text))[: -_MOST - 1 : -1]:
        clean = _WRAPPED.sub("", sentence[-_LONGEST:]).strip()
        if not clean.endswith("?"):
            yield clean


def _named(text: str, letters: Collection[str]) -> set[str]:
    return {letter for groups in _MENTIONED.findall(text) if (letter := "".join(groups)) in letters}


def _stated(sentence: str, letters: Collection[str]) -> str | None:
    """Return the letter that a sentence states as the answer; empty where it names several; None where it states
    none."""
    match = _STATED.fullmatch(sentence)
    if match and _named(match[2].upper() if _SMALL.fullmatch(match[2]) else match[2], letters):
        if not _BEFORE_STATED.fullmatch(_CLAUSE.split(match[1])[-1]):
            return None if denies(sentence) else ""
        before, _, behind = match[2].rpartition(":")
        for tail in (match[2], *(() if denies(before) else (behind,))):
            if small := _SMALL.fullmatch(tail):
                return small[1].upper()
            if head := _HEAD.fullmatch(tail):
                letter, rest = head[1] or head[2], head[3]
                joined = _JOINED.match(rest)
                if letter not in letters:
                    return None
                several = joined is not None and _named(joined[0], letters)
                corrected = _CORRECTED.search(rest) and _named(rest, letters) - {letter}
                return "" if several or corrected or not _BEHIND_LETTER.fullmatch(rest) else letter
        if not denies(match[2]):
            return ""
    correct = _CORRECT.fullmatch(sentence)
    named = _named(correct[1], letters) if correct and not denies(sentence) else set()
    if correct and named and _ALSO.search(correct[2]) and _named(correct[2], letters):
        return ""
    return named.pop() if len(named) == 1 else None


def _alone(sentence: str, letters: Collection[str]) -> str:
    """Return the letter that is alone, and in no list, in the last clause with a letter; empty where there is none, or
    where the text around it denies it."""
    clauses = [clause for clause in _CLAUSE.split(sentence) if _named(clause, letters)]
    matches = [_ALONE.fullmatch(clause) for clause in clauses[-2:]]
    last = matches[-1] if matches else None
    if last is None or (len(matches) == 2 and matches[0]) or denies(sentence.rpartition(last[1] or last[2])[2]):
        return ""
    before, colon, rest = sentence.rpartition(last[1] or last[2])[0].rpartition(":")
    clause = _CLAUSE.split(before)[-1].strip()
    return "" if colon and not rest.strip(" (") and " " in clause and _denies_next(clause) else last[1] or last[2]
