r"""How people write an answer, undone: units, currencies and wrapped text go, and a chain of equalities is reduced to
what it says.

| written | read as |
|---|---|
| `\$18`, `£18`, `18€`, `USD 18`, `18 dollars`, `18\text{ cm}^2`, `18 m/s` | `18`, where the label is a bare number |
| `18x`, `18 thousand`, `18 or 19`, `not 18` | itself: these words change the number |
| `x = 3 \cdot 6 = 18` | `18` |
| `5 = 6 = 18`, `18 \approx 5` | nothing: a false statement holds no answer |
| `\frac13 \approx 0.333` | `\frac13`: what is exact comes first |
| `x \approx 18` | `18` |
| `18{,}000`, `18,\!000`, `18\,000`, `18 000` | `18000` |
| `\text{Evelyn}`, `(\text{Evelyn})` | `Evelyn` |
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

_THOUSANDS = re.compile(r"(?<=\d),\\!(?=\d{3})")
_SPACE = re.compile(r"\\[,;:!> ]|~|\\q?quad\b|\s")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|rm)\s*\{([^{}]*)\}")
_DIGIT_GROUPS = re.compile(r"(?<![\d.])\d{1,3}(?:(?: |\{,\})\d{3})+(?![\d])")
_SIGNS = {"²": "^2", "³": "^3", "°": r"^\circ ", r"\degree": r"^\circ "}
_CURRENCY = re.compile(r"\b(?:US|A|C|NZ|HK)?\\?\$|[£€¥₹₩₽¢]|\\(?:pounds|euro|yen|textsterling|texteuro)\b ?")
_CURRENCY_CODE = re.compile(r"^(?:USD|EUR|GBP|JPY|INR|CNY|RMB|Rs\.?) ?(?=[-\d.])")
_NUMBER = r"[-+−]?(?:\d[\d,]*\.?\d*|\.\d+|(?:\d+ ?)?\\[dt]?frac(?:\{[-\d.]+\}\{[-\d.]+\}|\d\d)|\d+/\d+)"
_POWER = r"(?:\^(?:\d|\{-?\d\}))?"
_SYMBOL = (
    r"(?:mm|cm|dm|km|m|in|ft|yd|mi|mg|kg|g|lbs?|oz|ms|min|s|hrs?|h|ml|mL|cl|l|L|kmh|kph|mph|Hz|kHz|N|J|kJ|W|kW|kWh|V|A|"
    r"Pa|kPa|K|C|F|mol|sq|rad|deg|units?|USD|EUR|GBP|JPY|INR|CNY|RMB)"
)
_DEGREE = r"(?: ?\^(?:\\circ|\{\\circ\}) ?|°)?"
_SYMBOLS = re.compile(rf"({_NUMBER}) ?{_DEGREE}{_SYMBOL}{_POWER}(?: ?[/*· ] ?{_SYMBOL}{_POWER})*\.?")
_WORDS = re.compile(rf"({_NUMBER}) ?((?:[A-Za-z]+{_POWER}[ /-]?)+)\.?")
_CHANGE_THE_NUMBER = frozenset(
    re.findall(
        r"\w+",
        "and or not pi e i dozen score half percent hundred thousand million billion trillion squared cubed plus minus "
        "dozens halves thirds tenths hundredths thousandths hundreds thousands millions billions trillions "
        "times over mod factorial sqrt root sin cos tan log ln exp if to",
    )
)
_RELATION = re.compile(r"\\(?:approx(?:eq)?|simeq|sim|cong|doteq)\b|≈|≃|=")
_OTHER_RELATION = re.compile(
    r"[<>≤≥≠]|\\(?:leq?|geq?|neq?|lt|gt|equiv|in|pm|mp)\b|[!:=]=|→|\\(?:to|rightarrow|implies)\b"
)
_NAME = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?(?:\([A-Za-z]\))?")
_WORD_ANSWER = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z]+(?:[ '-][A-Za-z]+)*")

Equal = Callable[[str, str], bool]
"""Whether two expressions are equal."""
Value = Callable[[str], float | None]
"""Of an expression without unknowns; None with one."""


@dataclass(frozen=True)
class _Chain:
    exact: list[str]
    rounded: list[str]
    """What stands after the first sign of approximation."""


def plain(answer: str) -> str:
    """The answer without what only sets it: spaces, `\\text`, currencies, groups of digits, a full stop."""
    answer = _THOUSANDS.sub(",", answer)
    for sign, written in _SIGNS.items():
        answer = answer.replace(sign, written)
    while answer != (answer := _TEXT.sub(r" \1 ", answer)):
        pass
    answer = _CURRENCY.sub("", " ".join(_SPACE.sub(" ", answer).split())).replace(" ^", "^")
    answer = _DIGIT_GROUPS.sub(lambda number: re.sub(r" |\{,\}", "", number[0]), answer)
    return _CURRENCY_CODE.sub("", answer.strip().rstrip(".,;").strip())


def without_unit(answer: str) -> str:
    """A number without the unit that follows it; anything else as it is."""
    symbols = _SYMBOLS.fullmatch(answer)
    if symbols:
        return symbols[1]
    spelled = _WORDS.fullmatch(answer)
    if not spelled:
        return answer
    named = [word.lower() for word in re.findall(r"[A-Za-z]+", spelled[2])]
    is_unit = len(named[0]) > 2 and all(len(word) > 2 or word in ("of", "a", "an", "in") for word in named)
    return spelled[1] if is_unit and _CHANGE_THE_NUMBER.isdisjoint(named) else answer


def is_number(label: str) -> bool:
    """Whether a label is a bare number, so that letters beside a number can only be its unit."""
    return re.fullmatch(_NUMBER, label) is not None


def words(answer: str) -> str | None:
    """An answer in words, case and outer parentheses aside; None where it is something else."""
    bare = answer.strip("() ")
    return " ".join(bare.lower().split()) if _WORD_ANSWER.fullmatch(bare) else None


def stated(answer: str, value: Value, equal: Equal) -> str | None:
    """What a chain of equalities says the answer is; None where it says something false. Anything else as it is."""
    chain = _chain(answer)
    if chain is None:
        return answer
    exact = [member for member in chain.exact if not _NAME.fullmatch(member)]
    found = (exact or chain.rounded[:1] or chain.exact)[-1]
    known = value(found)
    if known is None:
        return found
    for member in exact:
        if member != found and value(member) is not None and not equal(member, found):
            return None
    for member in chain.rounded:
        other = value(member)
        if other is not None and abs(known - other) > max(abs(known) / 100, _half_of_last_digit(member)):
            return None
    return found


def _chain(answer: str) -> _Chain | None:
    """None where there is no chain, or more than one."""
    if _OTHER_RELATION.search(answer) or re.search(r",(?!\d{3})", answer):
        return None
    depths = [0]
    for char in answer:
        depths.append(depths[-1] + (char in "{([") - (char in "})]"))
    signs = [sign for sign in _RELATION.finditer(answer) if depths[sign.start()] == 0]
    if not signs:
        return None
    ends = [*(sign.start() for sign in signs), len(answer)]
    begins = [0, *(sign.end() for sign in signs)]
    members = [answer[begin:end].strip() for begin, end in zip(begins, ends, strict=True)]
    first = next((i for i, sign in enumerate(signs, 1) if sign[0] != "="), len(members))
    return _Chain([m for m in members[:first] if m], [m for m in members[first:] if m])


def _half_of_last_digit(number: str) -> float:
    decimals = re.fullmatch(r"[-+−]?\d*\.?(\d*)", number)
    return 0.0 if decimals is None else 0.5 * 10.0 ** -len(decimals[1]) * (1 + 1e-9)
