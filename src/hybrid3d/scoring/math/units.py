"""Units and other words beside numbers: which are the same, and which change a number's meaning."""

from __future__ import annotations

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
    names = []
    for word in words:
        lower = word.lower()
        names.append(UNITS.get(word) or UNITS.get(lower) or _singular(lower))
    text = " ".join(names).replace(" ^", "^").replace(" per ", " / ")
    text = {"km / h": "kmh", "mi / h": "mph"}.get(text, text)
    for prefix, power in (("square ", "^2"), ("cubic ", "^3")):
        if text.startswith(prefix) and len(names) == 2 and "^" not in text:
            text = text.removeprefix(prefix) + power
    return text.removesuffix("^1")


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
