"""Equations in plain text as MathML, which browsers typeset themselves.

x_p E                            products are written side by side
z_1 = MLP(LN(z')) + z'           subscripts, primes, functions
q k^T / sqrt(d)                  a fraction of the product before the stroke and the factor after it
x in R^(H x W x C)               sets, and "x" between spaces as a multiplication sign
[x_class; x_1 E; ...]            sequences
"""

import re
from collections.abc import Iterator

from vitrail.core.html import Html, escape

_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z][A-Za-z0-9]*)(?P<primes>'*)|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)|(?P<dots>\.\.\.)"
    r"|(?P<sign>.))"
)
_GREEK = {"mu": "μ", "sigma": "σ", "gamma": "γ", "beta": "β", "epsilon": "ε", "sum": "∑"}  # noqa: RUF001
_SIGNS = {"*": "⊙", "-": "−"}  # noqa: RUF001
_CLOSING = {"(": ")", "[": "]"}
_ENDS = {"=", "+", "-", "*", ",", ";", "in"}  # what a fraction does not reach beyond


def typeset(equation: str) -> Html:
    """An equation as MathML, one line for each part that ends in a comma and two spaces."""
    lines = (f'<math display="block">{_Parser(line).row()}</math>' for line in equation.split(",  "))
    return Html(f'<div class="equation" role="math" aria-label="{escape(equation)}">{"".join(lines)}</div>')


def symbols(equation: str) -> list[str]:
    """The names in an equation, each with its subscript if that is one word, in the order of their first use."""
    found = re.findall(r"[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)?'*", re.sub(r"\bin\b| x (?=\S)", " ", equation))
    return list(dict.fromkeys(found))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def row(self, closing: str = "") -> str:
        """Everything up to a closing bracket, or to the end."""
        parts: list[str] = []
        start = 0  # of the product before a stroke
        while (token := self._peek()) is not None:
            sign = token["sign"]
            if sign is not None and sign == closing:
                self.at = token.end()
                break
            if sign == "/":
                self.at = token.end()
                over = "".join(parts[start:])
                parts[start:] = [f"<mfrac><mrow>{over}</mrow><mrow>{self._divisor()}</mrow></mfrac>"]
                continue
            if self._is_times(token, parts):
                self.at = token.end()
                parts.append("<mo>&times;</mo>")
                continue
            if (sign or token["name"]) in _ENDS:
                self.at = token.end()
                shown = "∈" if token["name"] == "in" else _SIGNS.get(sign, sign)
                parts.append(f"<mo>{escape(shown)}</mo>")
                start = len(parts)
                continue
            parts.append(self._factor())
        return "".join(parts)

    def _divisor(self) -> str:
        """The factor after a stroke; brackets around it are not needed."""
        if self.text[self.at :].lstrip().startswith("("):
            self.at = self.text.index("(", self.at) + 1
            return self.row(")")
        return self._factor()

    def _peek(self) -> re.Match[str] | None:
        return _TOKEN.match(self.text, self.at) if self.text[self.at :].strip() else None

    def _is_times(self, token: re.Match[str], parts: list[str]) -> bool:
        return bool(parts) and token[0] == " x" and self.text[token.end() :].startswith(" ")

    def _factor(self) -> str:
        """A name, number or bracket with its scripts; a function with its argument."""
        token = self._peek()
        if token is None:
            return ""
        self.at = token.end()
        if token["name"] == "sqrt" and self.text.startswith("(", self.at):
            self.at += 1
            return f"<msqrt>{self.row(')')}</msqrt>"
        if token["sign"] in _CLOSING:
            close = _CLOSING[token["sign"]]
            base = f"<mrow><mo>{token['sign']}</mo>{self.row(close)}<mo>{close}</mo></mrow>"
        else:
            base = _atom(token)
        scripts = dict(self._scripts())
        match sorted(scripts):
            case ["^"]:
                base = f"<msup>{base}{scripts['^']}</msup>"
            case ["_"]:
                base = f"<msub>{base}{scripts['_']}</msub>"
            case ["^", "_"]:
                base = f"<msubsup>{base}{scripts['_']}{scripts['^']}</msubsup>"
        if token["name"] and self.text.startswith("(", self.at):
            self.at += 1
            return f"{base}<mrow><mo>(</mo>{self.row(')')}<mo>)</mo></mrow>{self._power()}"
        return base

    def _power(self) -> str:
        """An exponent of a whole function, as the T of a transpose."""
        scripts = dict(self._scripts())
        return f"<msup><mrow></mrow>{scripts['^']}</msup>" if "^" in scripts else ""

    def _scripts(self) -> Iterator[tuple[str, str]]:
        while self.at < len(self.text) and self.text[self.at] in "_^":
            kind = self.text[self.at]
            self.at += 1
            if self.text.startswith("(", self.at):
                self.at += 1
                yield kind, f"<mrow>{self.row(')')}</mrow>"
            else:
                word = re.match(r"[A-Za-z0-9]+'*|.", self.text[self.at :])
                text = word[0] if word else ""
                self.at += len(text)
                yield kind, f"<mi>{escape(_GREEK.get(text, text))}</mi>" if not text.isdigit() else f"<mn>{text}</mn>"


def _atom(token: re.Match[str]) -> str:
    if token["number"]:
        return f"<mn>{token['number']}</mn>"
    if token["dots"]:
        return "<mo>…</mo>"
    if token["name"]:
        shown = "&#8477;" if token["name"] == "R" else _GREEK.get(token["name"], token["name"])
        primes = "&prime;" * len(token["primes"])
        return f"<msup><mi>{shown}</mi><mo>{primes}</mo></msup>" if primes else f"<mi>{shown}</mi>"
    return f"<mo>{escape(_SIGNS.get(token['sign'], token['sign']))}</mo>"
