"""The README's examples run as pasted, section by section."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
SECTIONS = {
    section.splitlines()[0]: blocks
    for section in re.split(r"^#+ ", README.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    if (blocks := re.findall(r"```python\n(.*?)```", section, re.DOTALL))
}


def test_every_part_of_the_package_has_an_example():
    assert {"A first result", "Groups", "Properties", "How it is computed", "Captum", "dattri", "TRAK"} <= set(SECTIONS)


@pytest.mark.parametrize("section", SECTIONS)
def test_readme_section_runs_as_pasted(section, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in SECTIONS[section]:
        exec(compile(block, f"README.md, {section}", "exec"), names)
        assert "print(" not in block or capsys.readouterr().out
