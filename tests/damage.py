"""Damage of files, for properties of commands that read them: bits, lengths, and fields of JSON."""

import json

from hypothesis import strategies as st

#: What stands in a field or a column instead of its value.
ODD = [None, -1, 0, 10**9, 2**63, 10**30, "x", "\ud800", "\x00", [], ["x"], {}, 1.5, True, [["a"]], float("nan"), 3, 5]
BYTES = ("flip", "cut", "zero", "remove")


def damage_bytes(data, file, kind):
    """Flips bits, cuts, zeroes or removes a file."""
    content = bytearray(file.read_bytes())
    if kind == "remove":
        return file.unlink()
    if kind == "flip" and content:
        for _ in range(data.draw(st.sampled_from([1, 4, 40]))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        content = content[: data.draw(st.integers(0, len(content)))]
    elif kind == "zero":
        content = bytes(len(content))
    file.write_bytes(content)


def damage_field(data, file, odd=(*ODD, 10**400, "<b>", "=1", "a\nb"), depth=4):
    """Changes or removes a field of a JSON file, at most so deep; its own digest follows the change."""
    content = node = json.loads(file.read_text("utf-8"))
    for _ in range(data.draw(st.integers(0, depth - 1))):
        inner = [key for key, value in items(node) if isinstance(value, dict | list) and value]
        if not inner:
            break
        node = node[data.draw(st.sampled_from(inner))]
    keys = [key for key, _ in items(node)]
    if not keys:
        return
    key = data.draw(st.sampled_from(keys))
    if data.draw(st.booleans()):
        node[key] = data.draw(st.sampled_from(odd))
    else:
        del node[key]
    file.write_text(json.dumps(content))


def items(node):
    """The keys and values of an object or a list."""
    return [*node.items()] if isinstance(node, dict) else [*enumerate(node)]
