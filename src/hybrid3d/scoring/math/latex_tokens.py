"""Splits a formula in LaTeX, or in plain characters, into tokens, of which none is dropped but spacing and sizes.

What a reader of tokens does not know it must refuse: everything that is visible in the formula is a token.

Of units and other words beside numbers, tables say which are the same, and which change a number's meaning.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hybrid3d.scoring.functions import closing_braces

_NAMES = {
    "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre", "m": "meter metre",
    "in": "inch inche", "ft": "foot feet", "yd": "yard", "mi": "mile", "kg": "kilogram kilo", "g": "gram gm",
    "mg": "milligram", "lb": "pound lbs", "oz": "ounce", "l": "liter litre", "ml": "milliliter millilitre",
    "s": "second sec", "min": "minute", "h": "hour hr", "day": "day", "week": "week wk", "month": "month",
    "year": "year yr", "degree": "degree deg", "radian": "radian rad", "dollar": "dollar usd buck", "cent": "cent",
    "euro": "euro eur", "mph": "mph", "kmh": "kph kmh", "unit": "unit", "square": "square sq", "cubic": "cubic cu",
    "hz": "hertz", "v": "volt", "w": "watt", "j": "joule", "n": "newton", "pa": "pascal", "k": "kelvin", "mol": "mole",
    "gal": "gallon", "acre": "acre", "ha": "hectare",
}  # fmt: skip
UNITS: dict[str, str] = {name: unit for unit, names in _NAMES.items() for name in (unit, *names.split())}
"""The canonical name of each unit by its names in the singular."""
UNITS |= {f"{name}s": unit for name, unit in UNITS.items() if len(name) > 2}

LETTER_UNITS = set("mgshlLVWJNKACF")
"""Units of one letter. Others beside a number, such as k and x, may change what it is."""

NUMBER_WORDS = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
"""Words after a number that multiply it."""

ORDINALS = {"th", "st", "nd", "rd"}

FILLERS = set(
    "the a an number value answer final result solution total is are was be it its so thus hence therefore we get have "
    "equal equals exactly of there approximately about roughly around".split()
)
"""Words before a number that do not change it."""

NOT_UNITS = set(
    "not no non never nor or and if then unless when where while except without but than more less least most fewer "
    "greater larger smaller bigger over under above below between to from until up down plus minus times divided "
    "by mod modulo base choose factorial squared cubed root power half halves third thirds quarter quarters fourth "
    "fourths fifth fifths sixth sixths seventh eighth eighths ninth tenth tenths hundredth hundredths thousandth "
    "thousandths wrong false incorrect true correct undefined negative positive instead maybe perhaps possibly either "
    "neither both versus vs rather dozens hundreds thousands millions billions remainder approximately".split()
)
"""Words after a number that are no unit: with one of them, what stands there is not the number."""

BASES = {
    name: base
    for base, name in enumerate(
        "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split(), start=2
    )
}


def canonical_unit(words: list[str]) -> str:
    """Return words as a unit's canonical name: `square centimeters` and `cm ^2` are both `cm^2`."""
    names = [UNITS.get(word) or UNITS.get(word.lower()) or _singular(word.lower()) for word in words]
    text = " ".join(names).replace(" ^", "^").replace(" per ", " / ")
    text = {"km / h": "kmh", "mi / h": "mph"}.get(text, text)
    for prefix, power in (("square ", "^2"), ("cubic ", "^3")):
        if text.startswith(prefix) and len(names) == 2 and "^" not in text:
            text = text.removeprefix(prefix) + power
    return text.removesuffix("^1")


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


Kind = Literal["number", "letter", "word", "command", "symbol"]
MAX_CHARACTERS = 5000  # of a formula

FUNCTIONS = {
    *("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "sech", "csch"),
    *("arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc", "arcsinh", "arccosh", "arctanh"),
    *("log", "ln", "lg", "exp", "gcd", "lcm", "max", "min", "det"),
}
GREEK = set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho varrho sigma "
    "varsigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega "
    "ell".split()
)
_PLAIN_COMMANDS = {"sqrt": "sqrt", "pi": "pi", "infinity": "infty", "inf": "infty", "infty": "infty"}
_TEXT = "text textbf textit textrm textnormal textsf texttt textup mbox hbox mathrm operatorname emph".split()
_ALPHABETS = "mathbf boldsymbol bm mathit mathsf mathcal mathtt pmb".split()
_INVISIBLE = set(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr middle displaystyle textstyle scriptstyle quad qquad "
    "limits nolimits thinspace medspace enspace space rm bf it".split()
)
_GLUED = {"cm", "mm", "km", "kg", "ft", "th", "st", "nd", "rd"}
_SAME = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "times": "*", "cdot": "*",
    "ast": "*", "div": "/", "le": "leq", "leqslant": "leq", "ge": "geq", "geqslant": "geq", "ne": "neq", "lt": "<",
    "gt": ">", "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "vert": "|",
    "lvert": "|", "rvert": "|", "colon": ":", "varnothing": "emptyset", "degree": "circ", "fbox": "boxed",
    "imath": "i", "simeq": "approx", "dots": "ldots", "cdots": "ldots", "dotsc": "ldots",
    "bigcup": "cup", "smallsetminus": "setminus",
    "backslash": "setminus", "percent": "%", "land": "and", "lor": "or", "prime": "'", "infin": "infty",
}  # fmt: skip
_CHARACTERS = {
    "−": "-", "–": "-", "×": "*", "·": "*", "∙": "*", "⋅": "*", "÷": "/", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ",
    "≈": r"\approx ", "∞": r"\infty ", "°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "±": r"\pm ", "∓": r"\mp ", "√": r"\sqrt ", "π": r"\pi ", "θ": r"\theta ", "ℝ": r"\mathbb{R} ", "→": r"\to ",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "…": r"\ldots ",
    "′": "'", "’": "'", "∣": "|", "⟨": r"\langle ", "⟩": r"\rangle ", "€": r"\text{euro}", "£": r"\text{pound}",
    **{character: f"^{{{digit}}}" for digit, character in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    **{character: f"_{{{digit}}}" for digit, character in enumerate("₀₁₂₃₄₅₆₇₈₉")},
}  # fmt: skip
# What stands for a vector; \times is then the cross product, unless it is a part of a number such as 3 \times 10^8
_VECTOR = re.compile(
    r"\\(?:mathbf|textbf|boldsymbol|bm|pmb|bf|vec|hat|widehat|tilde|bar)\s*\{?\s*(?:\\[A-Za-z]+|[A-Za-z])(?![A-Za-z])"
    r"|\\overrightarrow"
)
_CASES = re.compile(
    r"\\left\s*\\\{\s*\\begin\{(?:array|aligned|matrix)\}(?:\{[lcr|\s]*\})?(.*?)\\end\{(?:array|aligned|matrix)\}\s*"
    r"\\right\s*\.",
    re.DOTALL,
)
_HALF_OF_DAY = re.compile(
    r"(?<=:\d\d)(?:\s|~|\\[ ,;])*(\\(?:text|mathrm)\s*\{\s*)?([AaPp])\.?\s?[Mm](?![A-Za-z])\.?(?(1)\s*\})"
)
_COMBINATIONS = re.compile(r"(?:^\s*|\{\}\s*)[_^](?:\{(\d+)\}|(\d))\s*(?:C|\\mathrm\{C\})_(?:\{(\d+)\}|(\d))")
_TIMES = re.compile(r"(?P<scientific>\d\s*(?:\\times|×)\s*10(?!\d))|\\times(?![A-Za-z])|×")
_OF_ONE_LETTER = {"mathbb", "vec", "hat", "bar", "tilde", "overline", "dot"}
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|,\\!\s*|\\[,;: ]|~|[ ])\d{3})+(?![\d,])")
_COMMA_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_TOKEN = re.compile(
    r"(?P<space>\s+|~|\\[,;:!> ]|\$|\\[()\[\]]|\\[hv]space\s*\{[^{}]*\})"
    r"|(?P<environment>\\(?:begin|end)\s*\{[A-Za-z]+\*?\}(?:\s*\{[lcr|\s]*\})?)"
    r"|\\(?P<command>[A-Za-z]+|[{}%$|&#_\\])"
    r"|(?P<number>\d+\.?\d*|\.\d+)"
    r"|(?P<letters>[A-Za-z]+(?:(?<=[A-Za-z]{2})[-'][A-Za-z]+)*)"
    r"|(?P<symbol>.)",
    re.DOTALL,
)


class Unreadable(ValueError):
    """A formula that cannot be read whole."""


class Malformed(Unreadable):
    """A formula that nobody can read: a part of it is missing, or it is undefined."""


@dataclass(frozen=True)
class Token:
    """A token: a number, a letter of a formula, a word, a command without its backslash, or another character."""

    kind: Kind
    text: str
    spaced: bool = False  # whether white space stands before it

    def __str__(self) -> str:
        return {"command": f"\\{self.text} ", "word": f"<{self.text}>"}.get(self.kind, self.text)


def tokenize(formula: str, comma_thousands: bool) -> list[Token]:
    """Return the tokens of a formula, in which 1,234 is one number with `comma_thousands`, and two without.

    Unreadable: it is too long, or its braces are not balanced.
    """
    if len(formula) > MAX_CHARACTERS:
        raise Unreadable(f"a formula of {len(formula)} characters, more than {MAX_CHARACTERS}")
    text = _CASES.sub(r"\\begin{cases}\1\\end{cases}", formula).replace("...", r"\ldots ")
    text = _HALF_OF_DAY.sub(lambda found: rf"\text{{ {found[2].upper()}M}}", text)
    text = _COMBINATIONS.sub(r"\\binom{\1\2}{\3\4}", text)
    if _VECTOR.search(text):
        text = _TIMES.sub(lambda found: found["scientific"] or r"\cross ", text)
    text = "".join(_CHARACTERS.get(character, character) for character in text)
    text = _undouble(unicodedata.normalize("NFKC", text))
    text = _THOUSANDS.sub(lambda found: re.sub(r"\D", "", found.group()), text)
    if comma_thousands:
        text = _COMMA_THOUSANDS.sub(lambda found: found.group().replace(",", ""), text)
    return list(_tokens(text, in_text=False))


def literal(tokens: Sequence[Token]) -> str:
    """Return tokens as a text that is equal for equal tokens."""
    return "".join(map(str, tokens))


def characters(tokens: Sequence[Token]) -> str:
    r"""Return tokens as a text, the same for formulas that look alike: `x^{2}` and `x^2`, `\vec{a}` and `\vec a`."""
    texts, place = list[str](), 0
    while place < len(tokens):
        texts.append(str(tokens[place]).strip())
        opens = tokens[place].text in ("^", "_") or tokens[place].text in _OF_ONE_LETTER
        if opens and [token.text for token in tokens[place + 1 : place + 4 : 2]] == ["{", "}"]:
            place += 1
            texts.append(str(tokens[place + 1]).strip())
            place += 2
        place += 1
    return " ".join(texts)


def _undouble(text: str) -> str:
    r"""Return a text whose backslashes were escaped once too often with one backslash each."""
    if "\\\\begin" in text:
        return text.replace("\\\\", "\\")
    if "\\begin" in text:  # where they are ends of rows
        return text
    return re.sub(r"\\\\(?=[A-Za-z]{2}|[{}%$])", r"\\", text)


def _tokens(text: str, in_text: bool) -> Iterator[Token]:
    closings, position, spaced, after_number = closing_braces(text), 0, False, False
    while position < len(text):
        found = _TOKEN.match(text, position)
        assert found is not None, "the last alternative matches any character"
        position = found.end()
        name = found.group("command")
        if found.lastgroup == "space" or name in _INVISIBLE:
            spaced = True
            # The null delimiter of \left. and \right.
            if name in ("left", "right") and text[position : position + 1] == ".":
                position += 1
            continue
        new: list[Token]
        if name in _TEXT or name in _ALPHABETS:
            new, position = _styled(text, position, closings, is_text=name in _TEXT)
        elif name is not None:
            new = [_command(name)]
        elif found.group("environment"):
            new = [Token("command", re.sub(r"\\|\s|\*|\{[lcr|\s]*\}$", "", found.group()))]
        elif letters := found.group("letters"):
            new = _letters(letters, in_text, after_number, spaced)
        else:
            new = [Token("number" if found.group("number") else "symbol", found.group())]
            if new[0].text == "`":
                raise Unreadable("a quotation mark")
        if new:
            yield Token(new[0].kind, new[0].text, spaced)
            yield from new[1:]
            after_number = new[-1].kind == "number" or new[-1].text in ("}", ")")
            spaced = False


def _styled(text: str, position: int, closings: Mapping[int, int], is_text: bool) -> tuple[list[Token], int]:
    """Return the tokens in the braces after a command such as `text`, and where they end. Malformed: they do not."""
    start = re.compile(r"\s*\{").match(text, position)
    if start is None:
        return [], position  # the command's scope is one letter, which is read as what it is
    if start.end() - 1 not in closings:
        raise Malformed("a brace is not closed")
    end = closings[start.end() - 1]
    inside = text[start.end() : end]
    if not is_text:
        is_text = re.search(r"[A-Za-z]{2}", inside) is not None and "\\" not in inside
    return list(_tokens(inside, in_text=is_text)), end + 1


def _command(name: str) -> Token:
    name = _SAME.get(name, name)
    if name in ("and", "or"):
        return Token("word", name)
    if name == "i":
        return Token("letter", "i")
    return Token("command" if len(name) > 1 or name.isalpha() or name in "{}$&#_\\" else "symbol", name)


def _letters(letters: str, in_text: bool, after_number: bool, spaced: bool) -> list[Token]:
    """Return a run of letters as a word, a function's name, or letters of a formula."""
    if letters in FUNCTIONS or letters in _PLAIN_COMMANDS:
        return [Token("command", _PLAIN_COMMANDS.get(letters, letters))]
    if letters.lower() in ("percent", "percentage", "pct"):
        return [Token("symbol", "%")]
    # A unit, or an ordinal's end: 3 mg, 3cm and 3rd, but not 3mg, which may be a product
    is_unit = after_number and letters in (UNITS.keys() if spaced and len(letters) > 1 else _GLUED)
    if in_text or letters in ("and", "or") or is_unit or len(re.sub("[-']", "", letters)) > 3:
        return [Token("word", letters)]
    return [Token("letter" if letter.isalpha() else "symbol", letter) for letter in letters]
