"""The checks of this machine's GPU. `conftest.py` runs each in a process, which alone imports what is checked."""

from __future__ import annotations

import importlib

import pytest

from gpu.record import Record
from gpu.table import CHECKS, Check


def case(check: Check) -> object:
    marks = [pytest.mark.limit(check.seconds), pytest.mark.needs(*check.needs)]
    return pytest.param(check, id=check.name, marks=[*marks, pytest.mark.variables(**check.environment)])


@pytest.mark.parametrize("check", map(case, CHECKS))
def test_gpu(check: Check, record: Record, device: str) -> None:
    module, _, function = check.function.partition(":")
    getattr(importlib.import_module(f"gpu.{module}"), function)(record, device, **check.arguments)
