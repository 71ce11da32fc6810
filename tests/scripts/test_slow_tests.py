"""Which tests are long: the slowest, but never all rows of a function nor what holds a promise."""

import re

from scripts import slow_tests

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a.test_x" name="test_rows[1]" time="4.0" />
<testcase classname="tests.a.test_x" name="test_rows[2]" time="5.0" />
<testcase classname="tests.a.test_x" name="test_rows[a::b]" time="0.1" />
<testcase classname="tests.a.test_x" name="test_alone" time="6.0" />
<testcase classname="tests.a.test_x" name="test_quick" time="0.2" />
<testcase classname="tests.test_law" name="test_of_all" time="9.0" />
<testcase classname="tests.a.test_x.TestOne" name="test_in_it" time="0.1" />
<testcase classname="{file}" name="{name}" time="8.0" />
</testsuite></testsuites>"""


def test_the_slowest_are_listed_until_the_rest_fits(tmp_path):
    texts = (slow_tests.ROOT / "tests" / "promises.toml").read_text()
    held = next(n for n in re.findall(r"tests/[\w/]+\.py::\w+", texts) if "tests/test_" not in n)
    file, name = held.removesuffix(".py").split("::")
    text = JUNIT.format(file=file.replace(".py", "").replace("/", "."), name=name)
    (tmp_path / "times.xml").write_text(text)
    times = slow_tests.read_times(tmp_path / "times.xml")
    assert times[held] == 8.0 and round(sum(times.values()), 1) == 32.4
    assert "tests/a/test_x.py::TestOne::test_in_it" in times
    x = "tests/a/test_x.py::test_"
    assert slow_tests.choose(times, 33) == []
    assert slow_tests.choose(times, 27) == [x + "alone"]
    assert slow_tests.choose(times, 25) == [x + "alone", x + "rows[2]"]
    assert slow_tests.choose(times, 0) == [x + "alone", x + "rows[1]", x + "rows[2]"]
