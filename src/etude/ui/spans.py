"""Spans of time with a rate, and their mean rate in any window: a timeline of any length, drawn at any zoom.

    add(start, end, rate) …  ──▶  means(edges)  ──▶  [B] mean rate in each bin between the edges

Example: a process that was busy for 0.5 of the second from 7 to 8 is the span (7, 8, 0.5). The mean of a bin is the sum
of the parts of all spans in it, computed with two sorted arrays of starts and ends: B bins of N spans cost B log N,
independently of the run's length. Pure; times are seconds since the first event, so that sums over days keep their
milliseconds. Legend: N spans, B bins.
"""

from array import array

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Spans:
    """Spans of one kind; where they overlap, their rates add up."""

    def __init__(self) -> None:
        self._starts, self._ends, self._rates = array("d"), array("d"), array("d")
        self._sums: tuple[_Integral, _Integral] | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start_s: float, end_s: float, rate: float = 1.0) -> None:
        """Add a span; one without length or rate changes nothing."""
        if end_s > start_s and rate:
            self._starts.append(start_s)
            self._ends.append(end_s)
            self._rates.append(rate)
            self._sums = None

    def until(self, times_s: Floats) -> Floats:
        """The integral of the rate up to each of the given times."""
        if self._sums is None:
            rates = np.array(self._rates)
            self._sums = _Integral(np.array(self._starts), rates), _Integral(np.array(self._ends), rates)
        begun, over = self._sums
        return begun.until(times_s) - over.until(times_s)

    def rates(self, edges_s: Floats) -> Floats:
        """[B] mean rate between consecutive ascending edges."""
        return np.diff(self.until(edges_s)) / np.diff(edges_s)

    def total(self, from_s: float, to_s: float) -> float:
        """The integral of the rate within a window."""
        before, after = self.until(np.array([from_s, to_s]))
        return float(after - before)


class _Integral:
    """The integral of rates that begin at given times and never end."""

    def __init__(self, times_N: Floats, rates_N: Floats) -> None:
        order = np.argsort(times_N, kind="stable")
        self._times_N = times_N[order]
        rates = rates_N[order]
        self._rates = np.concatenate(([0.0], np.cumsum(rates)))
        self._moments = np.concatenate(([0.0], np.cumsum(rates * self._times_N)))

    def until(self, times: Floats) -> Floats:
        begun = np.searchsorted(self._times_N, times)
        result: Floats = self._rates[begun] * times - self._moments[begun]
        return result
