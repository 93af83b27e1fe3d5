"""What intervals from few samples have to be widened by."""

from __future__ import annotations

# 97.5% points of Student's t by degrees of freedom; beyond these the normal distribution's is near enough.
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
      12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042}  # fmt: skip
_NORMAL = 1.960


def student_point(freedom: int) -> float:
    """The 97.5% point of Student's t with `freedom` >= 1 degrees of freedom, or the next larger known one."""
    return _NORMAL if freedom > max(_T) else _T[max(known for known in _T if known <= freedom)]


def stretch(count: int) -> float:
    """How much longer a 95% interval is than the middle 95% of a bootstrap over `count` >= 2 groups.

    Draws from so few groups spread less than samples do, by sqrt((count - 1) / count), and know nothing of the spread
    itself being an estimate (Student's t): from 3 groups, 70% of such intervals hold the truth.
    """
    return student_point(count - 1) / _NORMAL * (count / (count - 1)) ** 0.5
