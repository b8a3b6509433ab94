"""Wilson's interval of a proportion, and tails and quantiles of Student's t distribution, without SciPy."""

import functools
import math


def t_tail(t: float, freedom: float) -> float:
    """Return the probability that Student's t exceeds `t` >= 0. Degrees of freedom may be fractional or infinite."""
    if freedom <= 0:
        return 0.5
    if freedom > 1e6:
        return 0.5 * math.erfc(t / math.sqrt(2))
    return 0.5 * incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


@functools.lru_cache(4096)
def t_quantile(share: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution for a probability `share` >= 0.5, by bisection."""
    if freedom <= 0:
        return math.inf
    low, high = 0.0, 1e3
    while t_tail(high, freedom) > 1 - share:
        high *= 10
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > 1 - share else (low, middle)
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function, by Lentz's continued fraction."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            d = 1 / (1 + numerator * d or tiny)
            c = 1 + numerator / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(log_front) / a * fraction


def wilson_interval(successes: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Return Wilson's interval of a proportion; `z` is that of 95 % by default."""
    share = successes / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(centre - half, 0.0), min(centre + half, 1.0)
