"""Convert equations from plain text to MathML, which browsers typeset without a script.

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
_PRODUCT_ENDS = {"=", "+", "-", "*", ",", ";", "in"}  # signs at which the product above a fraction starts


def typeset(equation: str) -> Html:
    """Return an equation as MathML. A comma followed by two spaces starts a new line."""
    lines = (f'<math display="block">{_EquationParser(line).row()}</math>' for line in equation.split(",  "))
    return Html(f'<div class="equation" role="math" aria-label="{escape(equation)}">{"".join(lines)}</div>')


def symbols(equation: str) -> list[str]:
    """Return the names in an equation in the order of their first use, each with its one-word subscript, if any."""
    names = re.findall(r"[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)?'*", re.sub(r"\bin\b| x (?=\S)", " ", equation))
    return list(dict.fromkeys(names))


class _EquationParser:
    """Recursive-descent parser of one line. Each method consumes text and returns MathML."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def row(self, closing: str = "") -> str:
        """Parse up to a closing bracket, or to the end."""
        parts: list[str] = []
        product_start = 0  # index of the first factor of the product that a fraction would have above
        while (token := self._peek()) is not None:
            sign = token["sign"]
            if sign is not None and sign == closing:
                self.at = token.end()
                break
            if sign == "/":
                self.at = token.end()
                numerator = "".join(parts[product_start:])
                fraction = f"<mfrac><mrow>{numerator}</mrow><mrow>{self._divisor()}</mrow></mfrac>"
                parts[product_start:] = [fraction]
                continue
            if self._is_times(token, parts):
                self.at = token.end()
                parts.append("<mo>&times;</mo>")
                continue
            if (sign or token["name"]) in _PRODUCT_ENDS:
                self.at = token.end()
                symbol = "∈" if token["name"] == "in" else _SIGNS.get(sign, sign)
                parts.append(f"<mo>{escape(symbol)}</mo>")
                product_start = len(parts)
                continue
            parts.append(self._factor())
        return "".join(parts)

    def _divisor(self) -> str:
        """Parse the factor after a slash. Brackets around it are left out."""
        if self.text[self.at :].lstrip().startswith("("):
            self.at = self.text.index("(", self.at) + 1
            return self.row(")")
        return self._factor()

    def _peek(self) -> re.Match[str] | None:
        """Return the next token without consuming it. None at the end."""
        return _TOKEN.match(self.text, self.at) if self.text[self.at :].strip() else None

    def _is_times(self, token: re.Match[str], parts: list[str]) -> bool:
        """Return whether a token is an "x" between spaces, which is a multiplication sign."""
        return bool(parts) and token[0] == " x" and self.text[token.end() :].startswith(" ")

    def _factor(self) -> str:
        """Parse a name, number or bracket with its scripts, or a function with its argument."""
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
        """Parse an exponent after the argument of a function, for instance the T of a transpose."""
        scripts = dict(self._scripts())
        return f"<msup><mrow></mrow>{scripts['^']}</msup>" if "^" in scripts else ""

    def _scripts(self) -> Iterator[tuple[str, str]]:
        """Yield subscript and superscript, as ("_" or "^", MathML)."""
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
    """Return a single token as MathML."""
    if token["number"]:
        return f"<mn>{token['number']}</mn>"
    if token["dots"]:
        return "<mo>…</mo>"
    if token["name"]:
        letter = "&#8477;" if token["name"] == "R" else _GREEK.get(token["name"], token["name"])
        primes = "&prime;" * len(token["primes"])
        return f"<msup><mi>{letter}</mi><mo>{primes}</mo></msup>" if primes else f"<mi>{letter}</mi>"
    return f"<mo>{escape(_SIGNS.get(token['sign'], token['sign']))}</mo>"
