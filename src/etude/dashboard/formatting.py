"""Formatting of quantities: one notation for the terminal and the page.

A missing quantity (``None``) is written as a dash, never as zero.
"""

from collections.abc import Mapping

from etude.telemetry.metrics import Metric, Notation
from etude.types import Json

MISSING = "–"

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def visible(text: str) -> str:
    """Escape invisible and control characters, so that none moves a cursor or hides a word."""
    return "".join(letter if letter.isprintable() or letter == "\n" else _spelt(letter) for letter in text)


def _spelt(letter: str) -> str:
    return "    " if letter == "\t" else repr(letter)[1:-1]


def percent(share: float | None, digits: int = 1) -> str:
    """A share as a percentage: 0.4264 → ``42.6%``."""
    return MISSING if share is None else f"{100 * share:.{digits}f}%"


def points(difference: float | None) -> str:
    """A difference of shares in percentage points, signed: 0.4264 → ``+42.6``."""
    return MISSING if difference is None else f"{100 * difference:+.1f}".replace("-", "−")


def signed(number: float | None, digits: int = 2) -> str:
    """A difference with a fixed number of decimals: 0.0394 → ``+0.04``."""
    return MISSING if number is None else f"{number:+.{digits}f}".replace("-", "−")


def duration(seconds: float | None) -> str:
    """Time as a clock shows it: 4000 → ``1:06:40``, 65 → ``1:05``."""
    if seconds is None:
        return MISSING
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def count(number: float | None) -> str:
    """A whole number with thin gaps between thousands: 1234567 → ``1 234 567``."""
    return MISSING if number is None else f"{round(number):,}".replace(",", "\u202f")


def brief(number: float | None) -> str:
    """A large number with three significant digits: 1234567 → ``1.23M``."""
    if number is None:
        return MISSING
    for scale, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= scale:
            return f"{number / scale:.3g}{suffix}"
    return f"{number:.3g}"


def size(size_bytes: float | None) -> str:
    """Bytes in decimal units: 1234567 → ``1.23 MB``."""
    if size_bytes is None:
        return MISSING
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def decimal(number: float | None, digits: int = 2) -> str:
    """A number with a fixed number of decimals."""
    return MISSING if number is None else f"{number:.{digits}f}".replace("-", "−")


def small(number: float | None) -> str:
    """A number of any magnitude with two significant digits: 0.0000031 → ``3.1×10⁻⁶``, 0.012 → ``0.012``."""
    if number is None:
        return MISSING
    if number == 0 or 1e-3 <= abs(number) < 1e3:
        return f"{number:.2g}".replace("-", "−")
    mantissa, _, exponent = f"{number:.1e}".partition("e")
    return f"{mantissa.replace('-', '−')}×10{superscript(int(exponent))}"


def small_percent(share: float | None) -> str:
    """A share that may be tiny, as a percentage with two digits: 0.0000164 → ``0.0016%``."""
    return MISSING if share is None else f"{float(f'{100 * share:.2g}'):.10f}".rstrip("0").rstrip(".") + "%"


def superscript(number: int) -> str:
    """An integer as superscript: −6 → ``⁻⁶``."""
    return str(number).translate(_SUPERSCRIPTS)


def milliseconds(value_ms: float | None) -> str:
    """A short time: 0.8231 → ``0.82 ms``, 312.3 → ``312 ms``."""
    if value_ms is None:
        return MISSING
    if value_ms < 10:
        return f"{value_ms:.2g} ms"
    return f"{value_ms:.1f} ms" if value_ms < 100 else f"{value_ms:.0f} ms"


def number_at(report: Mapping[str, Json], path: str) -> float | None:
    """The number at a dotted path such as ``heldout.pass_after``; ``None`` if there is none."""
    value: object = report
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) else None


def write_metric(metric: Metric, value: float | None, *, digits: int = 2) -> str:
    """Format a metric's value in its notation; ``digits`` are those of a decimal one."""
    match metric.notation:
        case Notation.COUNT:
            return count(value)
        case Notation.DECIMAL:
            return decimal(value, digits)
        case Notation.SIGNIFICANT:
            return small(value)
