"""Measure the CPU time of each test and print the most expensive ones after the run: a plugin that conftest.py loads.

CPU time, unlike elapsed time, does not depend on what else the machine does. It includes the processes that a test
started and waited for. A fixture that several tests share counts for the first of them.
"""

from __future__ import annotations

import resource
from collections.abc import Generator

import pytest

MAX_CPU_S = 5.0  # of an ordinary test without the marker `expensive`
SHOWN_TESTS = 10
PROPERTY = "cpu_s"


def read_cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class CpuTimes:
    """The CPU seconds of the tests of this process, or with xdist of all workers."""

    def __init__(self) -> None:
        self.start_s = 0.0
        self.tests: dict[str, float] = {}
        self.with_reason: set[str] = set()

    def pytest_runtestloop(self) -> None:
        self.start_s = read_cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.when == "teardown":
            now_s = read_cpu_s()
            item.user_properties.append((PROPERTY, now_s - self.start_s))
            self.start_s = now_s
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.tests[report.nodeid] = sum(
                float(str(value)) for name, value in report.user_properties if name == PROPERTY
            )
            if "expensive" in report.keywords:
                self.with_reason.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        most_expensive = sorted(self.tests.items(), key=lambda test: -test[1])
        shown = most_expensive[:SHOWN_TESTS]
        if len(shown) < SHOWN_TESTS:
            return
        total_s, shown_s = sum(self.tests.values()), sum(cpu_s for _, cpu_s in shown)
        terminalreporter.section(
            f"CPU time of the tests: {total_s:.0f} s, the {SHOWN_TESTS} most expensive {shown_s:.0f} s"
        )
        for test, cpu_s in shown:
            terminalreporter.write_line(f"{cpu_s:6.1f} s  {test}")
        for test, cpu_s in most_expensive:
            if cpu_s > MAX_CPU_S and test not in self.with_reason:
                terminalreporter.write_line(f"over {MAX_CPU_S:.0f} s without a reason (marker `expensive`): {test}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTimes())
