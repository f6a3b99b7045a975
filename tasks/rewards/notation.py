r"""Normalise the notation of an answer, as far as its meaning stays the same. `cairn.tasks.rewards.equality` reads the
result.

| written | read as |
|---|---|
| `\$18`, `USD 18`, `18 dollars`, `18\text{ cm}^2`, `18 m/s`, `18^\circ` | `18`, and its unit |
| `18x`, `18 million`, `18 tens`, `18K`, `18m` | itself: no unit of `_UNITS`; a lone letter is an unknown |
| `10\%`, `10 percent` | `\frac{10}{100}` |
| `3 1/2`, `1.8e4`, `0.1\overline{3}` | `3\frac{1}{2}`, `(1.8 \cdot 10^{4})`, `\frac{12}{90}` |
| `18{,}000`, `18,\!000`, `18\!,000`, `18{,}\!000`, `18\,000`, `18 000`, `18,000` | `18000` |
| `x = 3 \cdot 6 = 18`, `m + n = 18`, `x \approx 18` | `18` |
| `\frac13 \approx 0.333` | `\frac13`: the exact part counts |
| `5 = 6 = 18`, `18 \approx 5`, `2x = 18` | nothing: it is false, or says that something else is 18 |
| `2516_8`, `12:30`, `3:4:5`, `18 mod 20`, `eighteen`, `18\ldots`, `18...` | itself, as text: see `text_only` |
"""

import re
from collections.abc import Callable

LONGEST = 400
"""Maximum length of an answer that is read, in characters. The longest answer of MATH-500 has 159."""

_UPRIGHT = "\ue000"
"""Mark before a letter that was typeset as text, and so is no unknown."""
_THOUSANDS = re.compile(r"(?<=\d)(?:(?:\\! ?)?\{,\}(?:\\! ?)?|\\! ?,(?:\\! ?)?|,\\! ?)(?=\d{3})")
_SPACE = re.compile(r"(?<!\\)\\[,;:!> ]|~|\\q?quad\b|\{\}|\s")
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|normal)?|math(?:rm|bf|it|sf)|mbox|rm|operatorname|boldsymbol)\s*\{([^{}]*)\}"
)
_SIGNS = {"²": "^2", "³": "^3", "°": r"^\circ ", r"\degree": r"^\circ ", "−": "-", "\\left": "", "\\right": ""}
_END = re.compile(r"(?:(?<!\.)\.(?!\.)|[,; ])+$")
"""The end of a sentence. Several dots do not match: they leave a number open."""
_SPACED_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d)")
_COMMA_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_NUMBER = r"(?:\d+\.?\d*|\.\d+)"
_PERCENT = re.compile(
    rf"({_NUMBER}|(?:\d+ ?)?\\[dt]?frac\{{{_NUMBER}\}}\{{{_NUMBER}\}}) ?(?:\\?%|per ?cent\b|percentage\b)"
)
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![\w.])")
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar) ?(?:\{(\d+)\}|(\d))(?!\d)")
_MIXED = re.compile(r"(?<![\d./])(\d+) (\d+) ?/ ?(\d+)(?![\d./])")
_FUNCTION = re.compile(r"(?<![\\A-Za-z])(?=(?:sqrt|pi|sin|cos|tan|log|ln)(?![A-Za-z]))")
_BASE = re.compile(r"\(?([0-9A-Z]+)\)? ?_ ?\{? ?(\d+) ?\}?")
_CLOCK = re.compile(r"0*(\d{1,2}:\d\d(?::\d\d)?)(?: ?([ap])\.? ?m)?", re.IGNORECASE)
_NO_ARITHMETIC = re.compile(
    r"(?<![\\A-Za-z])(?<!\\begin\{)(?<!\\end\{)(?!(?:and|or)\b)[A-Za-z]{3,}|"
    r"\\[lcd]?dots[bcm]?(?![A-Za-z])|…|\.\.|:.*:|(?<![\^_])(?<!frac )\d \d|\\pm.*\\pm|[\d)}\]] ?['′″\"]|(?<=[\d)}]) ?_|"
    r"(?<![\\A-Za-z])(?:no|of|at|by|if|is|to|up|on|as|be)(?![A-Za-z])|"
    r"\\(?:[pb]?mod|equiv|not|to|sim|mapsto|[Rr]ightarrow|implies|mp|propto|cong)\b"
)

_UNITS = """
mm millimeter millimetre | cm centimeter centimetre | dm | m meter metre | km kilometer kilometre | in inch |
ft foot feet | yd yard | mi mile | mg milligram | g gram | kg kilogram | lb lbs pound | oz ounce | ton tonne |
ms millisecond | s sec second | min mins minute | h hr hrs hour | day | week | month | year yr yrs |
ml mL milliliter | cl | l L liter litre | gal gallon | cup | pint | kmh kph | mph | Hz hertz | kHz | N newton |
J joule | kJ | W watt | kW | kWh | V volt | A ampere | Pa pascal | kPa | mol mole | deg degree | rad radian |
unit | $ dollar USD | € euro EUR | £ GBP | ¥ yen JPY | ₹ rupee INR | yuan CNY RMB | ¢ cent |
item people person student child children man men woman women boy girl player team worker member friend guest
apple orange egg cookie candy candies sandwich slice piece meal bottle flower tree dog cat bird fish cow horse sheep
book page ticket coin marble card ball stamp car bus house room chair game goal vote question problem lesson lap
trip step point way digit integer solution outcome path edge vertex vertices face side diagonal triangle subset
factor divisor term value combination arrangement permutation calorie
"""
"""Units, each with its names. All counted things are one unit: they do not change a number."""
_NAMES = {name: names.split()[0] for names in _UNITS.split("|") for name in names.split()}
_PREFIX = r"(?:(?:square|sq|cubic|cu)\.? )?"
_POWER = r"(?: ?\^ ?(?:\d|\{-?\d\}))?"
_SYMBOL = "|".join(sorted((name for name in _NAMES if re.fullmatch(r"\w{2,3}", name)), key=len, reverse=True))
_WORD = "|".join(sorted((name for name in _NAMES if re.fullmatch(r"[a-z]{3,}", name)), key=len, reverse=True))
_LETTER = "[mgshlLNJWVA]"
_DEGREE = rf"\^ ?(?:\\circ|\{{ ?\\circ ?\}}) ?(?:{_UPRIGHT}?[CF])?"
_FACTOR = rf"{_PREFIX}(?:(?:{_SYMBOL}|(?i:{_WORD})(?:e?s)?)(?![A-Za-z])|{_UPRIGHT}{_LETTER}){_POWER}"
_ANY_FACTOR = rf"(?:{_FACTOR}|{_LETTER}(?![A-Za-z]){_POWER})"
_UNIT = re.compile(
    rf"(?P<body>.*(?:[\d)}}]|\\pi)) ?(?P<unit>(?:{_DEGREE}|(?:per |/ ?)?(?:{_FACTOR}|{_LETTER}(?= ?/)))"
    rf"(?: ?(?:/|\bper\b|·|\*|\\cdot|-|(?= )) ?(?:an? )?{_ANY_FACTOR})*)"
)
_CURRENCY = re.compile(
    r"(?:\b(?:US|[AC]|NZ|HK))?\\?\$|[£€¥₹¢]|\\(?:pounds|euro|yen|textsterling|texteuro)\b|"
    r"^(?:USD|EUR|GBP|JPY|INR|CNY)\b"
)
_CURRENCY_BETWEEN = re.compile(rf"(?<=\d) ?(?:{_CURRENCY.pattern}) ?(?=\d)")
_CURRENCIES = {"pounds": "£", "textsterling": "£", "euro": "€", "texteuro": "€", "yen": "¥"}

_CONNECTIVE = re.compile(r" ?,? ?(?:\b(?:and|or)\b|\\(?:lor|vee)\b) ?")
_RELATION = re.compile(r"\\(?:approx(?:eq)?|simeq|doteq)\b|≈|≃|=")
_OTHER_EQUALITY = re.compile(r"[!:=]=|=[>]|→")
_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|varphi|omega|Delta|ell|angle|triangle)\b"
)
_NAMED = re.compile(
    rf"(?:{_GREEK} ?)*[A-Za-z]*(?:_(?:\w|\{{\w+\}}))?'*(?:\([^()=]*\))?|\|[A-Z]+\||\\(?:over)?line\{{[A-Z]+\}}"
)
_NOUN = re.compile(
    r"[A-Za-z]{1,2}|[A-Z]+|(?i:area|perimeter|volume|sum|total|answer|probability|length|distance|cost|number|max|min|"
    r"maximum|minimum|product|speed|time|result)"
)
_NO_NOUNS = frozenset({"ln", "no"})
_WORDS = re.compile(r"(?=.*[A-Za-z]{3})[A-Za-z]+(?:[ '-][A-Za-z]+)*")

Equal = Callable[[str, str], bool]
"""Function that says whether two expressions are equal."""
Value = Callable[[str], float | None]
"""Function that returns the value of an expression without unknowns; None with one."""


def read(answer: str) -> tuple[str, str]:
    """Return an answer without its unit and without markup, and the normalised unit; empty where there is none.

    An answer of more than `LONGEST` characters is returned unchanged.
    """
    if len(answer) > LONGEST:
        return answer, ""
    answer = _plain(answer)
    written = [sign.removeprefix("\\") for sign in _CURRENCY.findall(answer)]
    signs = {"$" if sign.endswith("$") else _CURRENCIES.get(sign, sign) for sign in written}
    amount = _CURRENCY.sub("", _CURRENCY_BETWEEN.sub(" ", answer)).strip()
    match = None if re.search(r"\bper ?cent\b", amount) else _UNIT.fullmatch(amount)
    unit = _canonical(match["unit"]) if match else ""
    if signs:
        currency = _NAMES.get(sign := signs.pop(), sign)
        if signs or (unit and not unit.startswith("/") and unit != currency):
            return answer.replace(_UPRIGHT, ""), ""  # two units are none
        unit = currency + unit.removeprefix(currency)
    body = (match["body"] if match else amount).replace(_UPRIGHT, "").strip()
    return _numbers(body), unit


def _plain(answer: str) -> str:
    answer = _THOUSANDS.sub("", answer)
    for sign, written in _SIGNS.items():
        answer = answer.replace(sign, written)
    while answer != (answer := _TEXT.sub(_set_as_text, answer)):
        pass
    answer = " ".join(_SPACE.sub(" ", answer).split()).replace(" ^", "^")
    answer = _END.sub("", answer)
    answer = _PERCENT.sub(r"\\frac{\1}{100}", re.sub(r"^\$([^$]+)\$$", r"\1", answer))
    return _SPACED_GROUPS.sub(lambda number: number[0].replace(" ", ""), answer)


def _set_as_text(match: re.Match[str]) -> str:
    letter = re.fullmatch(r" *([A-Za-z]) *", match[1])
    return f" {_UPRIGHT}{letter[1]} " if letter else f" {match[1]} "


def _canonical(unit: str) -> str:
    """Return the normal form of a unit, such as `km/h` or `cm^2`; all counted things are one unit."""
    unit = unit.replace(_UPRIGHT, "")
    if "circ" in unit:
        return "deg"
    factors = []
    for part in re.split(r"(?=/|\bper\b)", unit):
        over = "/" if re.match(r"/|per\b", part) else ""
        for prefix, name, power in re.findall(
            r"(square|sq|cubic|cu)?\.? ?\b(?!an?\b|per\b|square|sq\b|cu)([A-Za-z_]+)(?: ?\^ ?\{?(-?\d)\}?)?", part
        ):
            known = next((n for n in (name, name.lower(), name.lower()[:-1], name.lower()[:-2]) if n in _NAMES), name)
            exponent = power or {"s": "2", "c": "3"}.get(prefix[:1], "")
            factors.append(over + _NAMES.get(known, known) + (f"^{exponent}" if exponent else ""))
    return " ".join(factors)


def _numbers(text: str) -> str:
    """Return a text with its numbers in LaTeX."""
    text = re.sub(r"^(?:minus|negative) ", "-", text)
    text = re.sub(r"^(\d+) ?_ ?(?:10|\{10\})$", r"\1", text)
    text = _SCIENTIFIC.sub(r"(\1 \\cdot 10^{\2})", text)
    text = _REPEATING.sub(_as_fraction, text)
    text = _MIXED.sub(lambda n: rf"{n[1]}\frac{{{n[2]}}}{{{n[3]}}}" if int(n[2]) < int(n[3]) else n[0], text)
    return _FUNCTION.sub(r"\\", re.sub(r"\\?sqrt ?\(([^()]*)\)", r"\\sqrt{\1}", text))


def _as_fraction(number: re.Match[str]) -> str:
    whole, fixed, cycle = number[1], number[2], number[3] or number[4]
    above = int(whole + fixed + cycle) - int("0" + whole + fixed)
    return rf"\frac{{{above}}}{{{'9' * len(cycle)}{'0' * len(fixed)}}}"


def text_only(answer: str) -> str | None:
    """Return the normal form of an answer that has no value here; None for an answer that can be computed.

    Such answers are words, a number with its base, a time, a ratio of three, and what dots leave open.
    """
    if len(answer) > LONGEST:
        return closed_up(answer)
    if base := _BASE.fullmatch(answer):
        return f"{base[1].lstrip('0')}_{base[2]}" if base[1][0].isdigit() else None
    if (time := _CLOCK.fullmatch(answer)) and int(time[1].partition(":")[2][:2]) < 60:
        return f"{time[1]} {(time[2] or '').lower()}"
    bare = answer.strip("() ")
    if _WORDS.fullmatch(bare):
        return " ".join(bare.lower().split())
    named = _split(answer, re.compile("="))[0]
    rest = " = ".join(part for part in named if len(named) == 1 or not _is_name(part))
    return closed_up(answer) if _NO_ARITHMETIC.search(rest) else None


def closed_up(text: str) -> str:
    """Return a text without spaces, except those that separate two numbers."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def integer(text: str) -> int | None:
    """Return the integer that an answer is, after at most a name; None where it is anything else."""
    body, _ = read(text)
    name, named, number = body.rpartition("=")
    if named and not _is_name(name.strip()):
        return None
    digits = _COMMA_GROUPS.sub(lambda match: match[0].replace(",", ""), number.strip("() "))
    return int(digits) if re.fullmatch(r"[-+]?\d{1,100}", digits) else None


def members(answer: str) -> list[str]:
    """Return the parts of a list between its commas and connectives."""
    answer = _CONNECTIVE.sub(", ", answer)
    depth = depths(answer)
    answer = _COMMA_GROUPS.sub(lambda n: n[0] if depth[n.start()] else n[0].replace(",", ""), answer)
    return _split(answer, re.compile("[,;]"))[0]


def stated(answer: str, value: Value, equal: Equal) -> tuple[str, str] | None:
    """Return the name that a chain of equalities gives to a value, or an empty one, and the value.

    None where the chain is false, or states something else than a value. A text without equalities has no name and is
    its own value.
    """
    if _OTHER_EQUALITY.search(answer):
        return None
    parts, signs = _split(answer, _RELATION)
    if not signs:
        return "", answer
    first = next((i for i, sign in enumerate(signs, 1) if sign != "="), len(parts))
    names = [part for part in parts if part and _is_name(part)]
    exact = [part for part in parts[:first] if part and part not in names]
    rounded = [part for part in parts[first:] if part and part not in names]
    if not exact and not rounded:
        return (names[0], names[-1]) if names else None
    result = (exact or rounded)[-1 if exact else 0]
    known = value(result)
    for part in exact:
        other = value(part)
        if other is None and known is not None:
            letters = set(re.findall(r"[A-Za-z]", part))
            holds = bool(names) and letters.isdisjoint(names)  # `y = 3x = 18` says nothing false
        else:
            holds = part == result or equal(part, result)
        if not holds:
            return None
    for part in rounded:
        other = value(part)
        if exact and (known is None or other is None or not _rounds(other, part, known)):
            return None
    return names[0] if names else "", result


def _is_name(text: str) -> bool:
    """Whether a text can only be the name of an answer: a letter, `f(3)`, words, an expression in several unknowns, a
    tuple of letters."""
    if re.fullmatch(r"\([a-z](?:, ?[a-z])+\)", text):
        return True
    terms = [term for term in re.split(r" ?(?:[-+*/]|\\cdot|\\times) ?", text) if term]
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]+", text)
    return (
        not text.startswith(("-", "+", "/"))
        and bool(terms)
        and len(set(terms)) == len(terms)
        and all(_NAMED.fullmatch(term) for term in terms)
        and all(_NOUN.fullmatch(word) and word not in _NO_NOUNS for word in words)
    )


def _split(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Return the parts of a text between separators outside of all brackets, and the separators."""
    depth = depths(text)
    signs = [sign for sign in separator.finditer(text) if depth[sign.start()] == 0]
    ends, begins = [*(sign.start() for sign in signs), len(text)], [0, *(sign.end() for sign in signs)]
    parts = [text[begin:end].strip() for begin, end in zip(begins, ends, strict=True)]
    return parts, [sign[0] for sign in signs]


def depths(text: str) -> list[int]:
    """Return the number of open brackets before each character."""
    counts = [0]
    for char in text:
        counts.append(counts[-1] + (char in "{([") - (char in "})]"))
    return counts


def _rounds(rounded: float, written: str, exact: float) -> bool:
    """Whether a value rounds another: to the last written digit, or to one percent."""
    decimals = re.fullmatch(r"[-+]?\d*\.?(\d*)", written)
    last = 0.0 if decimals is None else 0.5 * 10.0 ** -len(decimals[1]) * (1 + 1e-9)
    return abs(exact - rounded) <= max(abs(exact) / 100, last)
