"""Arithmetic with numbers that are too large to compute, by their remainders modulo a large prime.

``2^{10^9}`` has 300 million digits, but its remainder is one call of `pow`. The probability that two
different rational numbers have the same remainder modulo a random prime of 127 bits is less than 2^-80.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from treetune.exceptions import Absurd, NotAFormula

MOST_EXACT_BITS = 10_000
"""The most bits of a number whose exact value is kept next to its remainder."""
LARGEST_PRODUCT = 100_000
"""The most factors of a factorial or a binomial coefficient. To multiply so many takes some 20 ms."""
_LARGEST_OF_A_BINOMIAL = 2**64
"""The largest top or bottom of a binomial coefficient. It is smaller than the prime."""


@lru_cache(maxsize=64)
def prime_for(*texts: str) -> int:
    """Returns a prime of 127 bits that depends on all these texts.

    The texts are an answer and its gold, which are compared modulo the prime. The prime changes with the
    answer, so that nobody can choose a wrong answer that is equal to the gold modulo the prime.
    """
    import sympy

    # A number of 15 bytes is less than 2^126, so the sum has 127 bits.
    digest = hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).digest()
    return int(sympy.nextprime(2**126 + int.from_bytes(digest[:15], "big")))


@dataclass(frozen=True)
class Residue:
    """A rational number modulo a prime."""

    remainder: int
    prime: int
    exact: Fraction | None
    """The number itself, if it is small. Exponents need it, because a power can't be computed from the
    remainder of its exponent."""

    @classmethod
    def of(cls, value: Fraction, prime: int) -> Residue:
        """Returns the residue of a number. For 1/2 modulo 7 it is 4, since 2 · 4 = 1 + 7."""
        remainder = value.numerator * pow(value.denominator, -1, prime) % prime
        bits = max(abs(value.numerator), value.denominator).bit_length()
        return cls(remainder, prime, value if bits <= MOST_EXACT_BITS else None)

    def _of_remainder(self, remainder: int) -> Residue:
        return Residue(remainder % self.prime, self.prime, exact=None)

    def __add__(self, other: Residue) -> Residue:
        if self.exact is not None and other.exact is not None:
            return Residue.of(self.exact + other.exact, self.prime)
        return self._of_remainder(self.remainder + other.remainder)

    def __mul__(self, other: Residue | int) -> Residue:
        factor = Residue.of(Fraction(other), self.prime) if isinstance(other, int) else other
        if self.exact is not None and factor.exact is not None:
            return Residue.of(self.exact * factor.exact, self.prime)
        return self._of_remainder(self.remainder * factor.remainder)

    __rmul__ = __mul__

    def divide(self, divisor: Residue) -> Residue:
        """Returns this number divided by `divisor`. Raises NotAFormula if `divisor` is 0.

        If both numbers are known exactly (`exact`), the quotient is computed exactly, too.
        """
        if divisor.remainder == 0:
            raise NotAFormula("a division by zero")
        if self.exact is not None and divisor.exact is not None:
            return Residue.of(self.exact / divisor.exact, self.prime)
        return self._of_remainder(self.remainder * pow(divisor.remainder, -1, self.prime))

    def power(self, exponent: Residue) -> Residue:
        """Returns the power. Raises Absurd for an exponent that isn't an integer, or isn't known exactly."""
        if exponent.exact is None or exponent.exact.denominator != 1:
            raise Absurd("an exponent that is huge itself, or no integer")
        if self.remainder == 0 and exponent.exact <= 0:
            raise NotAFormula("a power of zero that isn't defined")
        # The power may be an exponent itself, as in 2^{10^9}. So its exact value is kept if it is small.
        if self.exact is not None:
            bits = max(abs(self.exact.numerator), self.exact.denominator).bit_length()
            if bits * abs(exponent.exact) <= MOST_EXACT_BITS:
                return Residue.of(self.exact ** int(exponent.exact), self.prime)
        return self._of_remainder(pow(self.remainder, int(exponent.exact), self.prime))

    def factorial(self) -> Residue:
        """Returns the factorial of a number up to `LARGEST_PRODUCT`."""
        number = self._small_number(LARGEST_PRODUCT)
        product = 1
        for factor in range(2, number + 1):
            product = product * factor % self.prime
        return self._of_remainder(product)

    def choose(self, bottom: Residue) -> Residue:
        """Returns the binomial coefficient of this number over `bottom`.

        Raises Absurd if it has more than `LARGEST_PRODUCT` factors (10^9 over 3 has three), or if a number is
        larger than `_LARGEST_OF_A_BINOMIAL`.
        """
        top = self._small_number(_LARGEST_OF_A_BINOMIAL)
        chosen = bottom._small_number(_LARGEST_OF_A_BINOMIAL)
        if chosen > top:
            return Residue.of(Fraction(0), self.prime)
        chosen = min(chosen, top - chosen)  # C(n, k) is C(n, n - k)
        if chosen > LARGEST_PRODUCT:
            raise Absurd("a binomial coefficient of too many factors")
        product_above = product_below = 1
        for index in range(chosen):
            product_above = product_above * (top - index) % self.prime
            product_below = product_below * (index + 1) % self.prime
        return self._of_remainder(product_above * pow(product_below, -1, self.prime))

    def _small_number(self, largest: int) -> int:
        """Returns this number as an integer. Raises Absurd unless it is one from 0 to `largest`."""
        if self.exact is None or self.exact.denominator != 1 or not 0 <= self.exact <= largest:
            raise Absurd("a factorial or binomial coefficient of a large number")
        return int(self.exact)
