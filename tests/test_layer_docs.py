"""The scripts of docs/layer.md train, on the virtual devices of the tests."""

import pathlib
import re

import pytest

TEXT = (pathlib.Path(__file__).parent.parent / "docs" / "layer.md").read_text("utf-8")
SCRIPTS = dict(re.findall(r"^## ([^\n]+)\n[^#]*?```python\n(.*?)```", TEXT, re.MULTILINE | re.DOTALL))


@pytest.mark.slow
@pytest.mark.parametrize("title", ["Train it", "In Flax NNX"])
def test_a_script_lowers_its_loss(title, capsys):
    names = {"__name__": "script"}
    exec(compile(SCRIPTS[title], title, "exec"), names)
    before, after = map(float, re.findall(r"\d+\.\d+", capsys.readouterr().out)[:2])
    assert after < 0.3 * before
    params = names.get("params")
    assert params is None or set(params["moe"]) == {"router", "experts"}  # as the page says
