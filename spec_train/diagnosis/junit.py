"""A diagnosis as JUnit XML, which CI systems show: a test case per check."""

import re
from xml.etree import ElementTree

from spec_train.diagnosis.checks import FINDING, UNDECIDED, Diagnosis

_NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(diagnosis: Diagnosis) -> bytes:
    """Return the XML: a finding is a failure, what is not decided is skipped."""
    states = [check.state for check in diagnosis.checks]
    suite = ElementTree.Element("testsuite", name="spec-train doctor", tests=str(len(states)))
    suite.set("failures", str(states.count(FINDING)))
    suite.set("errors", "0")
    suite.set("skipped", str(states.count(UNDECIDED)))
    for check in diagnosis.checks:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_NO_XML.sub("?", diagnosis.draft), name=check.name
        )
        lines = [
            *check.evidence,
            *([f"fix: {check.fix}", f"see {check.page}"] if check.fix else []),
        ]
        text, more = (_NO_XML.sub("?", part) for part in (check.text, "\n".join(lines)))
        if check.state == FINDING:
            ElementTree.SubElement(case, "failure", message=text, type=check.name).text = more
        elif check.state == UNDECIDED:
            ElementTree.SubElement(case, "skipped", message=text).text = more
        elif more:
            ElementTree.SubElement(case, "system-out").text = f"{text}\n{more}"
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"
