"""SkyPilot's own parsers against launch/skypilot.yaml and every `sky` command that it and launch/README.md name.

In an environment of its own, as SkyPilot brings 75 packages; needs no account and asks no cloud:

    pip install skypilot && python tests/external/skypilot.py
"""

import pathlib
import re
import shlex

import click
import sky
from sky.client.cli import command

ROOT = pathlib.Path(__file__).parent.parent.parent
TASK = ROOT / "launch/skypilot.yaml"


def parse(line):
    """The options of a `sky` command as SkyPilot understands them; raises click.UsageError."""
    words, group, name = shlex.split(line)[1:], command.cli, "sky"
    while isinstance(group, click.Group):
        name = words.pop(0)
        group = group.commands[name]
    return group.make_context(name, words).params


def refused(text):
    """Does SkyPilot refuse this task?"""
    try:
        sky.Task.from_yaml_str(text)
    except ValueError:
        return True
    return False


def main():
    text = TASK.read_text()
    task = sky.Task.from_yaml(str(TASK))
    assert (task.name, task.num_nodes, sorted(task.envs)) == ("routed", 1, ["COMMAND", "SHARD", "WORKDIR"])
    assert "routed.main" in task.run and "uv pip install" in task.setup
    for resources in task.resources:
        assert resources.job_recovery["max_restarts_on_errors"] == 1
        print("machine:", resources)
    for misspelt in ("name", "workdir", "num_nodes", "resources", "accelerators", "envs", "setup", "run"):
        assert refused(re.sub(rf"^( *){misspelt}:", rf"\1{misspelt}z:", text, flags=re.M)), misspelt
    sky.Task.from_yaml_str(text.replace("num_nodes: 1", "num_nodes: 4"))

    named = text + (ROOT / "launch/README.md").read_text()
    lines = re.findall(r"^#? {2,}(.*?\bsky .*?)(?= {3}|$)", named, flags=re.M)
    parts = [part.strip() for line in lines for part in line.split("&&") if part.strip().startswith("sky ")]
    assert len(parts) > 10, parts
    for part in parts:
        options = parse(part)
        assert options.get("entrypoint", ("launch/skypilot.yaml",)) == ("launch/skypilot.yaml",), part
        assert set(dict(options.get("env", ()))) <= set(task.envs), part
        if options.get("gpus"):
            sky.Resources.from_yaml_config({"accelerators": options["gpus"]})
        print("understood:", part)


if __name__ == "__main__":
    main()
