"""TODO"""

from __future__ import annotations

from support.exam import Exam

EXAMS: dict[str, Exam] = {}
