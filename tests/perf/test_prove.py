"""The record of ``make prove`` counts what pytest reports."""

from __future__ import annotations

from pathlib import Path

from perf.prove import summary

XML = """<testsuites><testsuite>
<testcase classname="a" name="fast" time="0.1"/>
<testcase classname="a" name="slow" time="9.0"/>
<testcase classname="a" name="bad" time="0.2"><failure message="no"/></testcase>
<testcase classname="a" name="left" time="0"><skipped message="no CUDA device"/></testcase>
</testsuite></testsuites>"""


def test_counts_failures_skips_and_the_slowest(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(XML)
    found = summary(path)
    assert (found["tests"], found["passed"]) == (4, 2)
    assert found["failed"] == ["a::bad"]
    assert found["skipped"] == {"no CUDA device": 1}
    assert next(iter(found["slowest_s"])) == "a::slow"
